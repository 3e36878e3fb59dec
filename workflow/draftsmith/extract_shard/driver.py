"""Feeds the engine, row after row without a pause, until every missing row of the shard is in the store or in the ledger."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import socket
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from draftsmith import engine, hardware
from draftsmith.config import Config
from draftsmith.errors import DraftsmithError
from draftsmith.extract_shard import ledger
from draftsmith.extract_shard.plan import PlannedRow
from draftsmith.extract_shard.publish import HeadCheck, Publisher
from draftsmith.files import write_json
from draftsmith.log import log
from draftsmith.signals import Termination

_LOG_SECONDS = 10.0
# Free bytes below which a failed run is put down to a full disk.
_FULL = 1 << 20


class ExtractionFailed(Exception):
    """The engine gave up; the message holds every traceback that was found."""


class Staging:
    """A folder beside the batch files, so that publishing is a rename; removed at the end, errors first kept by the driver."""

    def __init__(self, folder: Path, scatteritem: str) -> None:
        self._root = folder / ".staging"
        self.path = self._root / f"{scatteritem}-{socket.gethostname()}-{os.getpid()}"

    def __enter__(self) -> Path:
        self._sweep()
        self.path.mkdir(parents=True)
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def _sweep(self) -> None:
        # What a killed run of this host left; another host's may be alive.
        for old in self._root.glob("*"):
            name = re.fullmatch(r"\d+-of-\d+-(.+)-(\d+)", old.name)
            if name is None or name[1] != socket.gethostname():
                continue
            pid = int(name[2])
            if not psutil.pid_exists(pid):
                log(f"removing {old}, left by process {pid} that is gone")
                shutil.rmtree(old, ignore_errors=True)


def check_space(folder: Path, tokens: int, per_token: int) -> None:
    """Fail unless the missing states fit on the disk."""
    need, free = int(tokens * per_token * 1.05), shutil.disk_usage(folder).free
    if need > free:
        raise DraftsmithError(
            f"{folder}: {tokens} tokens need {need / 1e9:.1f} GB and {free / 1e9:.1f} GB are free; "
            "free some, or name another folder in extract.store"
        )


class Progress:
    """A line every ten seconds: rows, tokens/s, bytes, time left, failures."""

    def __init__(self, rows: int, tokens: int) -> None:
        self.rows, self.tokens = rows, tokens
        self.begun = self._last = time.perf_counter()
        self.done_rows = self.done_tokens = 0

    def add(self, tokens: int) -> None:
        """Count a row that the engine has finished."""
        self.done_rows += 1
        self.done_tokens += tokens

    def show(self, publisher: Publisher, always: bool = False) -> None:
        """Print the line, if it is time."""
        now = time.perf_counter()
        if not always and now - self._last < _LOG_SECONDS:
            return
        self._last = now
        rate = self.done_tokens / max(now - self.begun, 1e-9)
        left = (self.tokens - self.done_tokens) / rate if rate else float("inf")
        log(
            f"extract: {self.done_rows}/{self.rows} rows, {rate:,.0f} tokens/s, {publisher.batches} batches "
            f"({publisher.bytes / 1e9:.2f} GB) in the store, {len(publisher.failed)} rows failed, about {left:.0f} s left"
        )


def extract(
    config: Config, target: dict[str, Any], folder: Path, key: str, dtype: str,
    batches: Sequence[Sequence[PlannedRow]], tokens: dict[str, list[int]], scatteritem: str, termination: Termination,
) -> dict[str, Any]:  # fmt: skip
    """Extract ``batches`` into ``folder``.

    ``tokens`` gives a row's token ids. Returns the figures of the run: seconds, tokens/s, failures with their entries.
    Raises :class:`ExtractionFailed` when the engine dies; what was published stays.
    """
    longest = max(row.length for batch in batches for row in batch)
    plan = {
        "fingerprint": key, "target": target["fingerprint"], "layers": target["layers"], "num_layers": target["num_layers"],
        "hidden_size": target["hidden_size"], "dtype": dtype,
        "writer_threads": config.extract.writer_threads or (1 if hardware.device() == "cpu" else 8),
        "batches": [{"rows": [row.row_id for row in batch], "lengths": [row.length for row in batch]} for batch in batches],
    }  # fmt: skip
    with Staging(folder, scatteritem) as staging, _scratch() as scratch:
        write_json(staging / "plan.json", plan)
        engine.prepare_environment(config, scratch)
        check = None if config.engine.args.get("load_format") == "dummy" else HeadCheck(Path(target["path"]), dtype)
        publisher = Publisher(staging, folder, check, config.extract.verify_rows)
        begun = time.perf_counter()
        llm: Any = None
        try:
            llm = _load(config, target, longest + 2)
            loaded = time.perf_counter()
            log(f"extract: engine ready after {loaded - begun:.0f} s")
            answers = _rpc(llm, "draftsmith_attach", str((staging / "plan.json").resolve()), str(staging.resolve()))
            first = answers[0]
            log(
                f"extract: {first['model']} on {first['runner']}, states read by {first['method']}, layers {target['layers']} and the final one"
            )
            publisher.start()
            progress = Progress(
                sum(len(batch) for batch in batches), sum(row.length for batch in batches for row in batch)
            )
            _feed(llm, config, batches, tokens, publisher, progress, termination)
            drained = next(answer for answer in _rpc(llm, "draftsmith_drain") if answer["rank"] == 0)
            publisher.finish()
            progress.show(publisher, always=True)
        except BaseException as error:
            # A worker's files may be complete though the engine is not: publish what is right, then tell all that is known.
            with contextlib.suppress(BaseException):
                publisher.finish()
            entries = ledger.read(staging / "errors")
            if isinstance(error, DraftsmithError | KeyboardInterrupt) and not entries:
                raise
            text = "\n".join(ledger.text(entry) for entry in entries)
            with contextlib.suppress(OSError):
                write_json(
                    folder / ".ledger" / f"{time.time_ns()}.json", [*entries, ledger.describe(error, stage="driver")]
                )
            if shutil.disk_usage(folder).free < _FULL or _is_full(error):
                text += f"\n{folder}: the disk is full; free some, or name another folder in extract.store, and run the same command again"
            raise ExtractionFailed(
                f"{publisher.batches} batches were published before this\n{text or 'the workers recorded no error: the cause is above, in the log of the engine'}"
            ) from error
        finally:
            if llm is not None:
                _shut_down(llm)
        for entry in ledger.read(staging / "errors"):
            for row in entry.get("rows") or []:
                publisher.failed.setdefault(row, entry)
    seconds = time.perf_counter() - loaded
    return {
        "batches": publisher.batches, "tokens": publisher.tokens, "bytes": publisher.bytes,
        "load_seconds": round(loaded - begun, 2), "seconds": round(seconds, 2), "tokens_per_second": round(publisher.tokens / seconds, 1),
        "method": first["method"], "runner": first["runner"], "writer": drained,
        "failed": [{"row_id": row, "error": f"{e['type']}: {e['message']}", "traceback": e["traceback"]} for row, e in publisher.failed.items()],
    }  # fmt: skip


def _is_full(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    # A short path of its own, for sockets that vLLM leaves behind.
    path = Path(tempfile.mkdtemp(prefix="ds-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _load(config: Config, target: dict[str, Any], max_model_len: int) -> Any:
    arguments = engine.vllm_arguments(config, target, max_model_len)
    # A cached prefix would never pass through the model, so its states would never be seen.
    arguments["enable_prefix_caching"] = False
    arguments["worker_extension_cls"] = "draftsmith.extract_shard.worker.CaptureExtension"
    log(f"extract: loading {target['path']} with {arguments}")
    from vllm import LLM

    return LLM(**arguments)


def _rpc(llm: Any, method: str, *args: Any) -> list[dict[str, Any]]:
    answers = llm.collective_rpc(method, args=args)
    for answer in answers:
        if not answer["ok"]:
            raise ExtractionFailed(f"{method} failed\n{ledger.text(answer)}")
    return list(answers)


def _feed(
    llm: Any, config: Config, batches: Sequence[Sequence[PlannedRow]], tokens: dict[str, list[int]],
    publisher: Publisher, progress: Progress, termination: Termination,
) -> None:  # fmt: skip
    from vllm import SamplingParams, TokensPrompt

    from draftsmith.extract_shard.worker import request_id

    core = llm.llm_engine
    greedy = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    waiting = deque((index, place, row) for index, batch in enumerate(batches) for place, row in enumerate(batch))
    running: dict[str, PlannedRow] = {}
    at_once = 2 * config.engine.max_num_seqs
    stopping = False
    while waiting or running:
        if publisher.error is not None:
            raise publisher.error
        if termination.asked and not stopping:
            stopping = True
            # Finish the batches that have begun, so that nothing computed is lost, and begin no other.
            begun = waiting[0][0] if waiting and waiting[0][1] > 0 else None
            waiting = deque(item for item in waiting if item[0] == begun)
            log(
                f"extract: {termination.name}: no new batch is begun, {len(waiting) + len(running)} rows of open batches are finished"
            )
        while waiting and len(running) < at_once:
            index, place, row = waiting.popleft()
            request = request_id(index, place)
            running[request] = row
            core.add_request(request, TokensPrompt(prompt_token_ids=tokens[row.row_id]), greedy)
        for output in core.step() if running else []:
            if output.finished:
                row = running.pop(output.request_id)
                publisher.sampled[row.row_id] = output.outputs[0].token_ids[0]
                progress.add(row.length)
        progress.show(publisher)


def _shut_down(llm: Any) -> None:
    # Ends the engine's processes now; left to the garbage collector they would outlive an error's traceback.
    with contextlib.suppress(BaseException):
        llm.llm_engine.engine_core.shutdown()
