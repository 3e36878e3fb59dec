"""The part that runs inside vLLM's workers: pairs each step's states with its requests and fills the batch buffers.

vLLM mixes :class:`CaptureExtension` into its own worker class (``worker_extension_cls``). The driver calls
``draftsmith_attach`` once the model is loaded, then feeds requests named by :func:`request_id`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith import store, vllm_compat
from draftsmith.extract_shard import ledger
from draftsmith.extract_shard.buffers import OpenBatch, Writer
from draftsmith.extract_shard.capture import Capture
from draftsmith.files import read_json

# vLLM may add a suffix of its own to a request's id.
_REQUEST = re.compile(r"^draftsmith-(\d+)-(\d+)(?:-.*)?$")


def request_id(batch: int, place: int) -> str:
    """Id of the request for the row at ``place`` of the plan's batch ``batch``."""
    return f"draftsmith-{batch}-{place}"


class CaptureExtension:
    """Methods that vLLM adds to its worker; the names carry the project's, as a clash with vLLM's own would be an error."""

    draftsmith: Recorder

    def draftsmith_attach(self, plan: str, staging: str) -> dict[str, Any]:
        """Start to record. ``plan`` is a JSON file (see driver.py), ``staging`` the folder for finished batch files."""
        return _answer(self, lambda: self._draftsmith_attach(Path(plan), Path(staging)))

    def _draftsmith_attach(self, plan: Path, staging: Path) -> dict[str, Any]:
        self.draftsmith = Recorder(self.model_runner, read_json(plan), staging)  # type: ignore[attr-defined]
        return self.draftsmith.describe()

    def draftsmith_drain(self) -> dict[str, Any]:
        """Wait until every complete batch is on the disk; gives figures."""
        return _answer(self, lambda: self.draftsmith.drain())


def _answer(worker: Any, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    # An exception would reach the driver as its bare text, and leave the other ranks' answers in the queue.
    try:
        return {"ok": True, **call()}
    except BaseException as error:
        return {"ok": False, **ledger.describe(error, rank=getattr(worker, "rank", None), stage="rpc")}


class Recorder:
    """Records one rank's part: only the first tensor-parallel rank copies states, as all ranks hold the same."""

    def __init__(self, runner: Any, plan: dict[str, Any], staging: Path) -> None:
        self.runner, self.staging = runner, staging
        self.rank = vllm_compat.tensor_parallel_rank()
        self.batches: list[tuple[list[str], list[int]]] = [
            (batch["rows"], batch["lengths"]) for batch in plan["batches"]
        ]
        self.open: dict[int, OpenBatch] = {}
        self.capture = Capture(runner.get_model(), plan["layers"], plan["num_layers"])
        self.steps = 0
        self.collect_seconds = 0.0
        self.device = runner.device
        self.copies = torch.cuda.Stream() if self.device.type == "cuda" else None
        dtype = plan["dtype"]

        def header(rows: list[str], lengths: list[int], checksums: list[str]) -> store.BatchHeader:
            return store.BatchHeader(
                fingerprint=plan["fingerprint"], target=plan["target"], layers=plan["layers"], dtype=dtype, hidden_size=plan["hidden_size"],
                rows=rows, lengths=lengths, checksums=checksums, vllm=vllm_compat.version(),
            )  # fmt: skip

        tokens = max((sum(lengths) for _, lengths in self.batches), default=0)
        rows = max((len(lengths) for _, lengths in self.batches), default=0)
        capacity = (
            tokens * (store.bytes_per_token(len(plan["layers"]), plan["hidden_size"], dtype) + 4) + (rows + 1) * 8
        )
        self.writer = Writer(staging, header, capacity, plan["writer_threads"], self.copies is not None, self.failed)
        self._execute = runner.execute_model
        runner.execute_model = self.execute_model
        self._sample = runner.sample_tokens
        runner.sample_tokens = self.sample_tokens

    def describe(self) -> dict[str, Any]:
        """What the driver logs: how states are read, and by which model runner."""
        return {
            "rank": self.rank,
            "method": self.capture.method,
            "model": type(self.capture.model).__name__,
            "runner": f"{type(self.runner).__module__}.{type(self.runner).__qualname__}",
        }

    def failed(self, error: BaseException, rows: Sequence[str] | None = None) -> None:
        """Put ``error`` on record, for the driver to find."""
        ledger.record(
            self.staging / "errors",
            error,
            stage="write" if rows else "step",
            rank=self.rank,
            rows=list(rows) if rows else None,
        )

    def failed_step(self, error: BaseException) -> None:
        """Put an error of the engine's step on record, as far as the disk still takes it; it is raised in any case."""
        with suppress(OSError):
            self.failed(error)

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """The runner's own step; afterwards the states it left behind are collected."""
        try:
            if self.writer.error is not None:
                raise RuntimeError("a batch could not be written") from self.writer.error
            output = self._execute(scheduler_output, *args, **kwargs)
            if self.rank == 0 and scheduler_output.total_num_scheduled_tokens and not kwargs.get("dummy_run"):
                begun = time.perf_counter()
                with torch.inference_mode():
                    self.collect(scheduler_output)
                self.collect_seconds += time.perf_counter() - begun
                self.steps += 1
            return output
        except BaseException as error:
            self.failed_step(error)
            raise

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """The runner's own sampling, with its errors put on record."""
        try:
            return self._sample(*args, **kwargs)
        except BaseException as error:
            self.failed_step(error)
            raise

    def collect(self, scheduler_output: Any) -> None:
        """Copy each request's part of the step's flat states to its place in its batch's buffer."""
        order = vllm_compat.request_order(self.runner)
        scheduled = scheduler_output.num_scheduled_tokens
        starts = vllm_compat.start_positions(scheduler_output)
        lengths = [scheduled[request] for request in order]
        tokens = sum(lengths)
        aux, final = self.capture.take(tokens)
        ids = vllm_compat.input_ids(self.runner, tokens).to(torch.int32)
        # A NaN or infinity anywhere in a token's states survives both norms; zero means that one of its states is all zero.
        inf = torch.inf
        peaks = torch.minimum(
            torch.linalg.vector_norm(aux, inf, dim=-1).amin(-1), torch.linalg.vector_norm(final, inf, dim=-1)
        ).float()
        broken = torch.linalg.vector_norm(aux, inf, dim=-1).amax(-1).float()
        peaks = torch.where(torch.isfinite(broken), peaks, broken)
        if self.copies is not None:
            self.copies.wait_stream(torch.cuda.current_stream())
        touched: dict[int, OpenBatch] = {}
        with torch.cuda.stream(self.copies) if self.copies is not None else torch.no_grad():
            at = 0
            for request, length in zip(order, lengths, strict=True):
                self._place(request, starts[request], slice(at, at + length), aux, final, ids, peaks, touched)
                at += length
            if self.copies is not None:
                for tensor in (aux, final, ids, peaks):
                    tensor.record_stream(self.copies)
                event = torch.cuda.Event()
                event.record(self.copies)
                for batch in touched.values():
                    batch.event = event
        for index, batch in touched.items():
            if batch.complete:
                self.writer.submit(self.open.pop(index))

    def _place(
        self,
        request: str,
        start: int,
        part: slice,
        aux: Tensor,
        final: Tensor,
        ids: Tensor,
        peaks: Tensor,
        touched: dict[int, OpenBatch],
    ) -> None:
        match = _REQUEST.match(request)
        if match is None:
            raise RuntimeError(f"the engine ran the request {request!r}, which this driver did not send")
        index, place = int(match[1]), int(match[2])
        rows, lengths = self.batches[index]
        # Asynchronous scheduling may run on past the prompt before it learns that the request has ended.
        count = min(part.stop - part.start, lengths[place] - start)
        if count <= 0:
            return
        if index not in self.open:
            self.open[index] = self.writer.open(rows, lengths)
        batch = self.open[index]
        to = int(batch.offsets[place]) + start
        source, target = slice(part.start, part.start + count), slice(to, to + count)
        for buffer, values in ((batch.aux, aux), (batch.final, final), (batch.token_ids, ids), (batch.peaks, peaks)):
            buffer[target].copy_(values[source], non_blocking=True)
        # A preempted request starts again at 0, so this is set, not added up.
        if start > batch.filled[place]:
            raise RuntimeError(
                f"row {rows[place]}: tokens {batch.filled[place]} to {start} never came: is prefix caching on?"
            )
        batch.filled[place] = start + count
        touched[index] = batch

    def drain(self) -> dict[str, Any]:
        """Wait for the writers; gives their figures."""
        self.writer.drain()
        return {
            "rank": self.rank,
            "bytes_written": self.writer.bytes_written,
            "buffers": self.writer.buffers,
            "blocked_seconds": round(self.writer.blocked_seconds, 3),
            "collect_seconds": round(self.collect_seconds, 3),
            "steps": self.steps,
            "open_batches": len(self.open),
        }
