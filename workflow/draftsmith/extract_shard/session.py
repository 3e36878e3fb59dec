"""One engine from its load to its end, with the capture attached: rows go in, batch files come out in the staging folder."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from draftsmith import engine, hardware, progress_file, store, vllm_compat
from draftsmith.clean_gpus import leftovers
from draftsmith.config import Config
from draftsmith.extract_shard import ledger
from draftsmith.extract_shard import plan as plan_of
from draftsmith.extract_shard.ledger import ERRORS
from draftsmith.extract_shard.plan import PlannedRow
from draftsmith.extract_shard.progress import LoadPhases, Progress
from draftsmith.extract_shard.publish import Publisher
from draftsmith.extract_shard.watch import Watch, end_all
from draftsmith.files import write_json
from draftsmith.log import log
from draftsmith.processes import held_engine
from draftsmith.target_fingerprint import states_fingerprint

Batches = Sequence[Sequence[PlannedRow]]
_END_SECONDS = 15.0


class RpcFailed(Exception):
    """A call of a worker's method failed; the message is the worker's own traceback."""


class Session:
    """A context manager: loads the engine, and ends it with all of its processes."""

    def __init__(self, config: Config, target: dict[str, Any], staging: Path, longest: int) -> None:
        """``longest`` is the length of the longest row in tokens; ``staging`` takes plans, records of errors and batch files."""
        self.config, self.target, self.staging, self.longest = config, target, staging, longest
        self.errors = staging / "errors"
        self.llm: Any = None
        self.running: dict[str, PlannedRow] = {}
        self.seconds: dict[str, float] = {}
        self.attached: dict[str, Any] = {}
        self.step_tokens = 0
        self.buffered_bytes = 0
        """The most that is still written when no more batches are begun."""
        self._watch: Watch | None = None
        self._before: list[psutil.Process] = []
        self._plans = 0

    def __enter__(self) -> Session:
        os.environ[ERRORS] = str(self.errors.absolute())
        held_engine.hold(self.staging)
        self._before = psutil.Process().children(recursive=True)
        arguments = engine.vllm_arguments(self.config, self.target, self.longest + 2)
        # A cached prefix would never pass through the model, so its states would never be seen.
        arguments["enable_prefix_caching"] = False
        # Layers that were compiled before the capture was attached hand nothing over and call no hook.
        arguments["enforce_eager"] = True
        arguments["worker_extension_cls"] = "draftsmith.extract_shard.worker.CaptureExtension"
        self.step_tokens = int(arguments["max_num_batched_tokens"])
        arguments["worker_cls"] = "draftsmith.extract_shard.loud_worker.LoudWorker"
        log(f"extract: loading {self.target['path']}")
        progress_file.report(None, phase="loading the engine", always=True)
        # For the log alone: a terminal has no room for it.
        print(f"vllm.LLM(**{arguments})", file=sys.stderr, flush=True)
        begun = time.perf_counter()
        try:
            with LoadPhases():
                log("extract: importing vLLM, a quarter of a minute or more when the disk is cold")
                from vllm import LLM

                self.seconds["import"] = time.perf_counter() - begun
                vllm_compat.mend()
                if engine.on_cpu(self.config) and self.config.engine.tp == 1:
                    # In this process the class is imported in any case; vLLM would start another one to look at it,
                    # a quarter of a minute on a machine that has never seen it. What is wrong with it vLLM itself will tell.
                    with contextlib.suppress(Exception):
                        vllm_compat.model_class(self.target.get("architectures") or [])
                self.llm = LLM(**arguments)
            self.seconds["load"] = time.perf_counter() - begun
            log(f"extract: engine ready after {self.seconds['load']:.0f} s")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        # Ends the engine's processes now; left to the garbage collector they would outlive an error's traceback.
        children = [child for child in psutil.Process().children(recursive=True) if child not in self._before]
        if self._watch is not None:
            self._watch.stop()
        held_engine.release()
        if self.llm is not None:
            with contextlib.suppress(BaseException):
                self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        end_all([child for child in children if not _tracker(child)], _END_SECONDS)
        leftovers.forget()

    @property
    def killed(self) -> dict[str, Any] | None:
        """A worker that was gone without a record, as an entry of the ledger."""
        return None if self._watch is None else self._watch.gone

    def attach(self, key: str, stored: tuple[str, store.Storage], batches: Batches) -> None:
        """Begin to capture: ``key`` is the fingerprint, ``stored`` (dtype, storage); no later batch may be larger than ``batches``."""
        begun = time.perf_counter()
        target, (dtype, storage) = self.target, stored
        whose = states_fingerprint(target)
        tokens, rows = max(sum(row.length for row in batch) for batch in batches), max(len(batch) for batch in batches)
        header = store.BatchHeader(
            fingerprint=key, target=whose, layers=target["layers"], dtype=dtype, storage=storage,
            hidden_size=target["hidden_size"], rows=[""] * rows, lengths=[0] * (rows - 1) + [tokens], checksums=[], vllm="",
        )  # fmt: skip
        head, places = store.layout(header)
        size = max(at + length for at, length in places.values()) - len(head)
        buffers = plan_of.buffers(self.step_tokens, tokens, len(batches))
        self.buffered_bytes = size * buffers
        plan = {
            "fingerprint": key, "target": whose, "layers": target["layers"], "num_layers": target["num_layers"],
            "hidden_size": target["hidden_size"], "dtype": dtype, "storage": storage, "buffer_tokens": tokens, "buffer_bytes": size,
            "buffers": buffers, "in_writing": plan_of.IN_WRITING,
            "writer_threads": self.config.extract.writer_threads or (1 if hardware.device() == "cpu" else 8),
        }  # fmt: skip
        write_json(self.staging / "plan.json", plan)
        answers = self.rpc(
            "draftsmith_attach", str((self.staging / "plan.json").absolute()), str(self.staging.absolute())
        )
        self.attached = next(answer for answer in answers if answer["rank"] == 0)
        self.attached["async_scheduling"] = vllm_compat.schedules_asynchronously(self.llm)
        log(
            f"extract: {self.attached['model']} on {self.attached['runner']}, states read by {self.attached['method']}, "
            f"layers {target['layers']} and the final one"
        )
        self._watch = Watch(self.errors, {answer["rank"]: answer["pid"] for answer in answers})
        self._watch.start()
        leftovers.remember()
        self.seconds["attach"] = time.perf_counter() - begun

    def rpc(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """Call ``method`` in every worker."""
        answers = self.llm.collective_rpc(method, args=args)
        for answer in answers:
            if not answer["ok"]:
                raise RpcFailed(f"{method} failed\n{ledger.text(answer)}")
        return list(answers)

    def feed(
        self, batches: Batches, tokens: dict[str, list[int]], publisher: Publisher, progress: Progress,
        stop: Callable[[], str | None], at_once: int,
    ) -> dict[str, Any]:  # fmt: skip
        """Run ``batches`` through the engine, ``at_once`` rows at a time, and wait until they are written.

        ``stop()`` gives a reason to begin no further batch; those begun are finished, so that nothing computed is lost.
        Returns the writers' figures.
        """
        from vllm import SamplingParams, TokensPrompt

        from draftsmith.extract_shard.worker import request_id

        self._plans += 1
        plan = self.staging / f"batches-{self._plans}.json"
        write_json(
            plan, [{"rows": [r.row_id for r in batch], "lengths": [r.length for r in batch]} for batch in batches]
        )
        first = self.rpc("draftsmith_expect", str(plan.absolute()))[0]["first"]
        core = self.llm.llm_engine
        greedy = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        waiting = deque(
            (first + index, place, row) for index, batch in enumerate(batches) for place, row in enumerate(batch)
        )
        progress.expect(len(waiting), sum(row.length for _, _, row in waiting))
        self.running = {}
        stopping = False
        while waiting or self.running:
            if publisher.error is not None:
                raise publisher.error
            if not stopping and (reason := stop()):
                stopping = True
                begun = waiting[0][0] if waiting and waiting[0][1] > 0 else None
                waiting = deque(item for item in waiting if item[0] == begun)
                log(
                    f"extract: {reason}: no new batch is begun, {len(waiting) + len(self.running)} rows of open batches are finished"
                )
            while waiting and len(self.running) < at_once:
                index, place, row = waiting.popleft()
                request = request_id(index, place)
                self.running[request] = row
                core.add_request(request, TokensPrompt(prompt_token_ids=tokens[row.row_id]), greedy)
            for output in core.step() if self.running else []:
                if output.finished:
                    row = self.running.pop(output.request_id)
                    publisher.sampled[row.row_id] = output.outputs[0].token_ids[0]
                    progress.add(row.length)
            progress.show(publisher)
        drained = next(answer for answer in self.rpc("draftsmith_drain") if answer["rank"] == 0)
        publisher.settle()
        return drained


def _tracker(process: psutil.Process) -> bool:
    # Python's own helper ends with this process and not before.
    with contextlib.suppress(psutil.Error):
        return "resource_tracker" in " ".join(process.cmdline())
    return False
