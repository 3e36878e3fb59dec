"""One engine of benchmarks/extraction.py, in a process of its own: it reads one command a line and answers one line of JSON.

plain      vLLM's own ``LLM.generate`` with one token a prompt: prefill and nothing else
ours       extract_shard's session, writers and publisher: the code of the stage
connector  vLLM's ``extract_hidden_states`` with its ExampleHiddenStatesConnector
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import spread_experts

from draftsmith import engine, hardware, store, vllm_compat
from draftsmith.config import parse
from draftsmith.extract_shard.plan import PlannedRow, batch_tokens, pack
from draftsmith.extract_shard.progress import Progress
from draftsmith.extract_shard.publish import HeadCheck, Publisher
from draftsmith.extract_shard.session import Session

Rows = list[list[int]]


def prompts(spec: dict[str, Any], among: list[int]) -> Rows:
    """The same random token ids for every way, of lengths that are drawn from ``among``."""
    draw = random.Random(0)
    top = spec["target"]["vocab_size"] - 1
    lengths, left = [], spec["tokens"]
    while left > 0:
        lengths.append(min(draw.choice(among), max(left, 16)))
        left -= lengths[-1]
    return [[draw.randint(3, top) for _ in range(length)] for length in lengths]


class Plain:
    """Prefill alone."""

    def __init__(self, spec: dict[str, Any], sets: list[Rows]) -> None:
        self.load(spec, arguments(spec, sets))

    def load(self, spec: dict[str, Any], made: dict[str, Any]) -> None:
        """Start the engine; ``seconds`` has how long vLLM's import took, and all of it."""
        begun = time.perf_counter()
        from vllm import LLM

        self.seconds = {"import": time.perf_counter() - begun}
        vllm_compat.pass_over_foreign_objects()
        self.llm = LLM(**made)
        self.seconds["load"] = time.perf_counter() - begun
        self.gates = spread(spec, self.llm)

    def run(self, folder: Path, rows: Rows) -> tuple[int, int]:
        """Run the prompts ``rows``; gives the tokens read and the bytes written."""
        self.generate(rows)
        return sum(map(len, rows)), 0

    def generate(self, rows: Rows) -> list[Any]:
        """One greedy token for each prompt."""
        from vllm import SamplingParams, TokensPrompt

        greedy = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        return self.llm.generate([TokensPrompt(prompt_token_ids=row) for row in rows], greedy, use_tqdm=False)


class Connector(Plain):
    """vLLM's own way to hidden states; the file of a request is whole when its lock is free."""

    def __init__(self, spec: dict[str, Any], sets: list[Rows]) -> None:
        self.folder = Path(spec["store"]) / "connector"
        target = spec["target"]
        name = "ExampleHiddenStatesConnector"
        extra = {}
        if hardware.device() == "cpu":
            # Its copies ask for pinned memory, which a machine without a GPU has not.
            extra = {"kv_connector_module_path": "connector_cpu"}
            name = "CpuHiddenStatesConnector"
        made = arguments(spec, sets)
        made["max_model_len"] += 2
        made["speculative_config"] = {
            "method": "extract_hidden_states", "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [*target["layers"], target["num_layers"]]}},
        }  # fmt: skip
        made["kv_transfer_config"] = {
            "kv_connector": name, "kv_role": "kv_producer", **extra,
            "kv_connector_extra_config": {"shared_storage_path": str(self.folder), "num_writer_threads": 8},
        }  # fmt: skip
        self.load(spec, made)

    def run(self, folder: Path, rows: Rows) -> tuple[int, int]:
        answers = self.generate(rows)
        total = 0
        for answer in answers:
            path = Path(answer.kv_transfer_params["hidden_states_path"])
            lock = Path(f"{path}.lock")
            while True:
                with contextlib.suppress(FileNotFoundError), open(lock) as file:
                    fcntl.flock(file, fcntl.LOCK_SH)
                if path.is_file():
                    break
                time.sleep(0.01)
            total += path.stat().st_size
        return sum(map(len, rows)), total


class Ours:
    """The stage's own session: engine, capture, writers and publisher."""

    def __init__(self, spec: dict[str, Any], sets: list[Rows]) -> None:
        self.target, self.config = spec["target"], parse(spec["config"], "benchmark")
        self.tokens = {store.row_id(row): row for rows in sets for row in rows}
        dtype = hardware.target_dtype(self.config.target.dtype, self.target["torch_dtype"])
        storage = self.config.extract.storage
        self.stored = store.stored_as(storage, dtype)
        per_token = store.bytes_per_token(len(self.target["layers"]), self.target["hidden_size"], dtype, storage)
        self.batch_tokens = batch_tokens(self.config.extract.batch_tokens, per_token)
        self.key = store.fingerprint(self.target["fingerprint"], self.target["layers"], dtype, {}, storage)
        dummy = engine.dummy_weights(self.config)
        self.check = None if dummy else HeadCheck(Path(self.target["path"]), dtype)
        # Publishing is a rename, so the staging folder has to lie where the pass writes to.
        self.link = Path(spec["scratch"]) / "ours-store"
        self.staging = self.link / ".staging"
        self.point_to(Path(spec["store"]))
        self.session = Session(self.config, self.target, self.staging, longest(sets))
        self.session.__enter__()
        self.gates = spread(spec, self.session.llm)
        self.session.attach(self.key, self.stored, [batch for rows in sets for batch in self.batches(rows)])
        self.seconds = self.session.seconds

    def point_to(self, store: Path) -> Path:
        """Let the engine write beside ``store``."""
        folder = store / "ours"
        (folder / ".staging" / "errors").mkdir(parents=True, exist_ok=True)
        self.link.unlink(missing_ok=True)
        self.link.symlink_to(folder)
        return folder

    def batches(self, rows: Rows) -> list[list[PlannedRow]]:
        """The prompts ``rows`` as the stage packs them into files."""
        return pack([PlannedRow(store.row_id(row), len(row)) for row in rows], self.batch_tokens)

    def run(self, folder: Path, rows: Rows) -> tuple[int, int]:
        """Everything from the first request to the last published file."""
        self.point_to(folder.parent)
        batches = self.batches(rows)
        publisher = Publisher(self.staging, folder, self.check, self.config.extract.verify_rows)
        publisher.start()
        self.figures = self.session.feed(
            batches, self.tokens, publisher, Progress(), lambda: None, 2 * self.config.engine.max_num_seqs
        )
        publisher.finish()
        lost = sum(len(batch) for batch in batches) - len(publisher.published)
        if lost:
            raise RuntimeError(f"{lost} rows were not published: {publisher.failed}")
        return publisher.tokens, publisher.bytes


def spread(spec: dict[str, Any], llm: Any) -> list[int]:
    """Where the spec says so, let dummy weights use all experts; gives for each rank how many gates were drawn anew."""
    return list(llm.apply_model(spread_experts.spread)) if spec.get("spread_experts") else []


def longest(sets: list[Rows]) -> int:
    """Tokens of the longest prompt."""
    return max(len(row) for rows in sets for row in rows)


def arguments(spec: dict[str, Any], sets: list[Rows]) -> dict[str, Any]:
    """The stage's own arguments of vLLM, without the capture."""
    made = engine.vllm_arguments(parse(spec["config"], "benchmark"), spec["target"], longest(sets) + 2)
    return made | {"enable_prefix_caching": False}


def main() -> None:
    """Load, answer with the seconds that it took, then run as often as asked."""
    # Whatever vLLM prints goes to the log; the answers have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    way, spec = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    config = parse(spec["config"], "benchmark")
    if config.engine.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    engine.prepare_environment(config, Path(spec["scratch"]) / way)
    if spec.get("spread_experts"):
        # The function goes to the workers by its name.
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    begun = time.perf_counter()
    sets = [prompts(spec, among) for among in spec["prompts"]]
    made: Any = {"plain": Plain, "ours": Ours, "connector": Connector}[way](spec, sets)
    answer: dict[str, Any] = {
        "start_seconds": round(time.perf_counter() - begun, 1),
        "startup": {name: round(value, 2) for name, value in made.seconds.items()},
        "gates_drawn": made.gates,
    }
    while True:
        print(json.dumps(answer), file=answers, flush=True)
        command = sys.stdin.readline().strip()
        if not command:
            break
        asked = json.loads(command)
        folder, rows = Path(asked["store"]) / way, sets[asked["prompts"]]
        rows = rows[: asked["rows"] or len(rows)]
        begun = time.perf_counter()
        tokens, written = made.run(folder, rows)
        seconds = time.perf_counter() - begun
        answer = {
            "tokens_per_second": round(tokens / seconds, 1),
            "seconds": round(seconds, 3),
            "bytes": written,
            "tokens": tokens,
        }
        if isinstance(made, Ours):
            answer["writer"] = made.figures
        shutil.rmtree(folder, ignore_errors=True)
    if isinstance(made, Ours):
        made.session.__exit__(None, None, None)
    else:
        made.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
