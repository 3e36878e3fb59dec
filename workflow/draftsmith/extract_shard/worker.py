"""The part that runs inside vLLM's workers: pairs each step's states with its requests and fills the batch buffers.

vLLM mixes :class:`CaptureExtension` into its own worker class (``worker_extension_cls``). The driver calls
``draftsmith_attach`` once the model is loaded, tells by ``draftsmith_expect`` which batches come, then feeds requests named
by :func:`request_id`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith import store, vllm_compat
from draftsmith.extract_shard import ledger
from draftsmith.extract_shard.buffers import OpenBatch, Ring
from draftsmith.extract_shard.capture import Capture
from draftsmith.extract_shard.writer import Writer
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

    def draftsmith_expect(self, plan: str) -> dict[str, Any]:
        """Batches that will come next: a JSON file with a list of {rows, lengths}, numbered on from those before."""
        return _answer(self, lambda: self.draftsmith.expect(read_json(Path(plan))))

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
        self.storage = plan["storage"]
        self.batches: list[tuple[list[str], list[int]]] = []
        self.open: dict[int, OpenBatch] = {}
        self._requests: Collection[str] = ()
        self.steps = self.restarts = 0
        self.collect_seconds = 0.0
        self.device = runner.device
        self.copies = torch.cuda.Stream() if self.device.type == "cuda" else None
        self.capture = Capture(runner.get_model(), plan["layers"], plan["num_layers"])

        def header(rows: list[str], lengths: list[int], checksums: list[str]) -> store.BatchHeader:
            return store.BatchHeader(
                fingerprint=plan["fingerprint"], target=plan["target"], layers=plan["layers"], dtype=plan["dtype"], storage=plan["storage"],
                hidden_size=plan["hidden_size"], rows=rows, lengths=lengths, checksums=checksums, vllm=vllm_compat.version(),
            )  # fmt: skip

        self.dtype = getattr(torch, plan["dtype"])
        self.ring = Ring(
            header, plan["buffer_bytes"], plan["buffer_tokens"], self.copies is not None, plan["in_writing"]
        )
        if self.rank == 0 and self.copies is not None:
            self.ring.prepare(plan["buffers"])
        self.writer = Writer(staging, self.ring, plan["writer_threads"], self.failed)
        self._execute = runner.execute_model
        runner.execute_model = self.execute_model

    def describe(self) -> dict[str, Any]:
        """What the driver logs: how states are read, by which model runner, in which process."""
        return {
            "rank": self.rank,
            "pid": os.getpid(),
            "method": self.capture.method,
            "model": type(self.capture.model).__name__,
            "runner": f"{type(self.runner).__module__}.{type(self.runner).__qualname__}",
        }

    def expect(self, batches: list[dict[str, Any]]) -> dict[str, Any]:
        """Take note of batches to come; gives the number of the first."""
        first = len(self.batches)
        self.batches += [(batch["rows"], batch["lengths"]) for batch in batches]
        return {"rank": self.rank, "first": first}

    def failed(self, error: BaseException, rows: Sequence[str], stage: str) -> None:
        """Put an error of the writers on record, for the driver to find."""
        ledger.record(self.staging / "errors", error, stage=stage, rank=self.rank, rows=list(rows))

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """The runner's own step; afterwards the states it left behind are collected."""
        if kwargs.get("dummy_run"):
            return self._execute(scheduler_output, *args, **kwargs)
        self._requests = scheduler_output.num_scheduled_tokens
        if self.writer.error is not None:
            raise RuntimeError("a batch could not be written") from self.writer.error
        output = self._execute(scheduler_output, *args, **kwargs)
        if self.rank == 0 and scheduler_output.total_num_scheduled_tokens:
            begun = time.perf_counter()
            with torch.inference_mode():
                self.collect(scheduler_output)
            self.collect_seconds += time.perf_counter() - begun
            self.steps += 1
        return output

    @property
    def rows_in_step(self) -> list[str]:
        """Ids of the rows that the present step is about, for the record of an error."""
        return [self._row(request) for request in self._requests]

    def _place(self, request: str) -> tuple[int, int]:
        match = _REQUEST.match(request)
        if match is None:
            raise RuntimeError(f"the engine ran the request {request!r}, which this driver did not send")
        return int(match[1]), int(match[2])

    def _row(self, request: str) -> str:
        batch, place = self._place(request)
        return self.batches[batch][0][place]

    def collect(self, scheduler_output: Any) -> None:
        """Copy each request's part of the step's flat states to its place in its batch's buffer."""
        order = vllm_compat.request_order(self.runner)
        scheduled = scheduler_output.num_scheduled_tokens
        starts = vllm_compat.start_positions(scheduler_output)
        lengths = [scheduled[request] for request in order]
        tokens = sum(lengths)
        aux, final = self.capture.take(tokens)
        # Copies, as vLLM may fill the same memory anew while they are on their way.
        ids = vllm_compat.input_ids(self.runner, tokens).to(torch.int32, copy=True)
        final = final.clone()
        touched: dict[int, OpenBatch] = {}
        if self.copies is not None:
            self.copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.copies) if self.copies is not None else nullcontext():
            # A NaN or infinity anywhere in a token's states survives both norms; zero means that one of its states is all zero.
            norms = torch.cat(
                [torch.linalg.vector_norm(aux, torch.inf, dim=-1), torch.linalg.vector_norm(final, torch.inf, dim=-1)[:, None]],
                dim=1,
            ).float()  # fmt: skip
            low, high = norms.aminmax(dim=-1)
            step = {"token_ids": ids, "peaks": torch.where(torch.isfinite(high), low, high)}
            step |= self._stored(aux, final)
            at = 0
            for request, length in zip(order, lengths, strict=True):
                self._copy(request, starts[request], slice(at, at + length), step, touched)
                at += length
            if self.copies is not None:
                for tensor in (aux, final, ids):
                    tensor.record_stream(self.copies)
                event = torch.cuda.Event()
                event.record(self.copies)
                for batch in touched.values():
                    batch.event = event
        for index, batch in touched.items():
            if batch.complete:
                self.writer.submit(self.open.pop(index))

    def _stored(self, aux: Tensor, final: Tensor) -> dict[str, Tensor]:
        if self.storage == "fp8":
            # A layer at a time: the float32 in between is twice the states.
            parts = [store.quantise(layer) for layer in aux.unbind(1)]
            number, scale = store.quantise(final)
            return {
                "aux": torch.stack([part for part, _ in parts], dim=1), "aux_scale": torch.stack([s for _, s in parts], dim=1),
                "final": number, "final_scale": scale,
            }  # fmt: skip
        return {"aux": aux.to(self.dtype), "final": final.to(self.dtype)}

    def _copy(
        self, request: str, start: int, part: slice, step: dict[str, Tensor], touched: dict[int, OpenBatch]
    ) -> None:
        index, place = self._place(request)
        rows, lengths = self.batches[index]
        # Asynchronous scheduling may run on past the prompt before it learns that the request has ended.
        count = min(part.stop - part.start, lengths[place] - start)
        if count <= 0:
            return
        if index not in self.open:
            self.open[index] = self.ring.open(rows, lengths)
        batch = self.open[index]
        to = batch.starts[place] + start
        source, target = slice(part.start, part.start + count), slice(to, to + count)
        for name, values in step.items():
            buffer = batch.peaks if name == "peaks" else batch.views[name]
            buffer[target].copy_(values[source], non_blocking=True)
        # A preempted request starts again at 0, so this is set, not added up.
        if start > batch.filled[place]:
            raise RuntimeError(
                f"row {rows[place]}: tokens {batch.filled[place]} to {start} never came: is prefix caching on?"
            )
        self.restarts += start < batch.filled[place]
        batch.filled[place] = start + count
        touched[index] = batch

    def drain(self) -> dict[str, Any]:
        """Wait for the writers; gives their figures."""
        self.writer.drain()
        return {
            "rank": self.rank,
            "bytes_written": self.writer.bytes_written,
            "buffers": self.ring.made,
            "blocked_seconds": round(self.ring.blocked_seconds, 3),
            "collect_seconds": round(self.collect_seconds, 3),
            "writer_seconds": {name: round(value, 3) for name, value in self.writer.seconds.items()},
            "steps": self.steps,
            "restarts": self.restarts,
            "open_batches": len(self.open),
        }
