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

from draftsmith import engine, hardware, store
from draftsmith.config import parse
from draftsmith.extract_shard.plan import PlannedRow, pack
from draftsmith.extract_shard.progress import Progress
from draftsmith.extract_shard.publish import HeadCheck, Publisher
from draftsmith.extract_shard.session import Session


def prompts(spec: dict[str, Any]) -> list[list[int]]:
    """The same random token ids for every way."""
    draw = random.Random(0)
    top = spec["target"]["vocab_size"] - 1
    lengths, left = [], spec["tokens"]
    while left > 0:
        lengths.append(min(draw.choice(spec["lengths"]), max(left, 16)))
        left -= lengths[-1]
    return [[draw.randint(3, top) for _ in range(length)] for length in lengths]


class Plain:
    """Prefill alone."""

    def __init__(self, spec: dict[str, Any], rows: list[list[int]]) -> None:
        from vllm import LLM

        self.rows = rows
        self.llm = LLM(**arguments(spec, rows))

    def run(self, folder: Path) -> int:
        """Gives the bytes written."""
        self.answers = self.generate()
        return 0

    def generate(self) -> list[Any]:
        """One greedy token for each prompt."""
        from vllm import SamplingParams, TokensPrompt

        greedy = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        return self.llm.generate([TokensPrompt(prompt_token_ids=row) for row in self.rows], greedy, use_tqdm=False)


class Connector(Plain):
    """vLLM's own way to hidden states; the file of a request is whole when its lock is free."""

    def __init__(self, spec: dict[str, Any], rows: list[list[int]]) -> None:
        from vllm import LLM

        self.rows = rows
        self.folder = Path(spec["store"]) / "connector"
        target = spec["target"]
        name = "ExampleHiddenStatesConnector"
        extra = {}
        if hardware.device() == "cpu":
            # Its copies ask for pinned memory, which a machine without a GPU has not.
            extra = {"kv_connector_module_path": "connector_cpu"}
            name = "CpuHiddenStatesConnector"
        made = arguments(spec, rows)
        made["max_model_len"] += 2
        self.llm = LLM(
            **made,
            speculative_config={
                "method": "extract_hidden_states", "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [*target["layers"], target["num_layers"]]}},
            },
            kv_transfer_config={
                "kv_connector": name, "kv_role": "kv_producer", **extra,
                "kv_connector_extra_config": {"shared_storage_path": str(self.folder), "num_writer_threads": 8},
            },
        )  # fmt: skip

    def run(self, folder: Path) -> int:
        answers = self.generate()
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
        return total


class Ours:
    """The stage's own session: engine, capture, writers and publisher."""

    def __init__(self, spec: dict[str, Any], rows: list[list[int]]) -> None:
        self.target, self.config = spec["target"], parse(spec["config"], "benchmark")
        planned = [PlannedRow(store.row_id(row), len(row)) for row in rows]
        self.tokens = {row.row_id: ids for row, ids in zip(planned, rows, strict=True)}
        self.batches = pack(planned, self.config.extract.batch_tokens)
        dtype = hardware.target_dtype(self.config.target.dtype, self.target["torch_dtype"])
        storage = self.config.extract.storage
        self.stored = store.stored_as(storage, dtype)
        self.key = store.fingerprint(self.target["fingerprint"], self.target["layers"], dtype, {}, storage)
        dummy = self.config.engine.args.get("load_format") == "dummy"
        self.check = None if dummy else HeadCheck(Path(self.target["path"]), dtype)
        self.staging = Path(spec["store"]) / "ours.staging"
        shutil.rmtree(self.staging, ignore_errors=True)
        self.staging.mkdir(parents=True)
        self.session = Session(self.config, self.target, self.staging, max(len(row) for row in rows))
        self.session.__enter__()
        self.session.attach(
            self.key, self.stored, max(sum(row.length for row in batch) for batch in self.batches), max(map(len, self.batches))
        )  # fmt: skip

    def run(self, folder: Path) -> int:
        """Everything from the first request to the last published file."""
        folder.mkdir(parents=True, exist_ok=True)
        publisher = Publisher(self.staging, folder, self.check, self.config.extract.verify_rows)
        publisher.start()
        self.figures = self.session.feed(
            self.batches, self.tokens, publisher, Progress(), lambda: None, 2 * self.config.engine.max_num_seqs
        )
        publisher.finish()
        if len(publisher.published) != len(self.tokens):
            raise RuntimeError(
                f"{len(publisher.published)} of {len(self.tokens)} rows were published: {publisher.failed}"
            )
        return publisher.bytes


def arguments(spec: dict[str, Any], rows: list[list[int]]) -> dict[str, Any]:
    """The stage's own arguments of vLLM, without the capture."""
    made = engine.vllm_arguments(parse(spec["config"], "benchmark"), spec["target"], max(len(row) for row in rows) + 2)
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
    begun = time.perf_counter()
    rows = prompts(spec)
    made: Any = {"plain": Plain, "ours": Ours, "connector": Connector}[way](spec, rows)
    answer: dict[str, Any] = {"start_seconds": round(time.perf_counter() - begun, 1)}
    if isinstance(made, Ours):
        answer["startup"] = {name: round(value, 2) for name, value in made.session.seconds.items()}
    while True:
        print(json.dumps(answer), file=answers, flush=True)
        command = sys.stdin.readline().strip()
        if not command:
            break
        folder = Path(spec["store"]) / way
        begun = time.perf_counter()
        written = made.run(folder)
        seconds = time.perf_counter() - begun
        tokens = sum(len(row) for row in rows)
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
