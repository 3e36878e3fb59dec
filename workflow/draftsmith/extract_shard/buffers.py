"""Batch buffers in host memory: filled by the model's process, written by its writer threads.

A buffer has the layout of the data part of a batch file, so a full one is written as it lies. There are only as many as
batches are open or being written: a slow disk slows the engine, it never fills the memory.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith import store


@dataclass
class OpenBatch:
    """A batch whose rows are arriving. ``row_ids``, ``lengths`` and ``starts`` are parallel."""

    row_ids: list[str]
    lengths: list[int]
    memory: Tensor
    aux: Tensor  # [T, A, H]
    final: Tensor  # [T, H]
    offsets: Tensor  # [R + 1]
    token_ids: Tensor  # [T]
    peaks: Tensor  # [T] float32: the smallest over states of the largest |x| of a token; NaN or inf where a state is
    filled: list[int] = field(default_factory=list)
    event: Any = None

    @property
    def complete(self) -> bool:
        """Whether every row has all its tokens."""
        return self.filled == self.lengths


class Writer:
    """Hands out buffers and writes full ones with a pool of threads."""

    def __init__(
        self,
        folder: Path,
        header: Callable[..., store.BatchHeader],
        capacity: int,
        threads: int,
        pinned: bool,
        failed: Callable[..., None],
    ) -> None:
        """``header(rows, lengths, checksums)`` makes a batch's header; ``failed(error, rows)`` records what cannot be written."""
        self.folder, self.header, self.capacity, self.pinned, self.failed = folder, header, capacity, pinned, failed
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="draftsmith-writer")
        self._free: list[Tensor] = []
        self._writing: set[Future[None]] = set()
        self._changed = threading.Condition()
        self.error: BaseException | None = None
        self.bytes_written = 0
        self.buffers = 0
        self.blocked_seconds = 0.0
        self.max_writing = threads + 2

    def open(self, row_ids: list[str], lengths: list[int]) -> OpenBatch:
        """A buffer for a batch; waits while the writers are behind."""
        import time

        begun = time.perf_counter()
        with self._changed:
            # Waiting is safe only while a write will end and free a buffer: rows of an open batch come from the very engine that waits here.
            self._changed.wait_for(lambda: self._free or len(self._writing) < self.max_writing)
            memory = self._free.pop() if self._free else None
        self.blocked_seconds += time.perf_counter() - begun
        if memory is None:
            memory = torch.empty(self.capacity, dtype=torch.uint8, pin_memory=self.pinned)
            self.buffers += 1
        header = self.header(row_ids, lengths, [""] * len(row_ids))
        dtype = getattr(torch, header.dtype)
        head, places = store.layout(header)

        def part(name: str, kind: torch.dtype) -> Tensor:
            at, size = places[name]
            return memory[at - len(head) : at - len(head) + size].view(kind)

        offsets = part("offsets", torch.int64)
        offsets.copy_(torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]))
        tokens, width = header.tokens, header.hidden_size
        return OpenBatch(
            row_ids, lengths, memory,
            part("aux", dtype).view(tokens, len(header.layers), width), part("final", dtype).view(tokens, width),
            offsets, part("token_ids", torch.int32),
            torch.zeros(tokens, dtype=torch.float32, pin_memory=self.pinned), filled=[0] * len(row_ids),
        )  # fmt: skip

    def submit(self, batch: OpenBatch) -> None:
        """Write a complete batch in the background; ``batch.event``, if any, is waited for first."""
        with self._changed:
            future = self._pool.submit(self._write, batch)
            self._writing.add(future)
        future.add_done_callback(lambda done: self._done(done, batch))

    def _done(self, future: Future[None], batch: OpenBatch) -> None:
        error = future.exception()
        if error is not None:
            self.error = self.error or error
            # On a full disk the record cannot be written either; the error itself reaches the driver by way of `error`.
            with suppress(OSError):
                self.failed(error, batch.row_ids)
        with self._changed:
            self._writing.discard(future)
            self._free.append(batch.memory)
            self._changed.notify_all()

    def _write(self, batch: OpenBatch) -> None:
        if batch.event is not None:
            batch.event.synchronize()
        good = []
        offsets = batch.offsets.tolist()
        for place, row in enumerate(batch.row_ids):
            try:
                self._validate(batch.peaks[offsets[place] : offsets[place + 1]])
                good.append(place)
            except ValueError as error:
                self.failed(error, [row])
        if not good:
            return
        rows = [(batch.aux[offsets[p] : offsets[p + 1]], batch.final[offsets[p] : offsets[p + 1]]) for p in good]
        checksums = [store.checksum(_buffer(aux), _buffer(final)) for aux, final in rows]
        header = self.header([batch.row_ids[p] for p in good], [batch.lengths[p] for p in good], checksums)
        head, places = store.layout(header)
        if len(good) == len(batch.row_ids):
            parts = [_buffer(batch.memory[: sum(size for _, size in places.values())])]
        else:
            starts = [0, *torch.tensor(header.lengths).cumsum(0).tolist()]
            ids = [batch.token_ids[offsets[p] : offsets[p + 1]] for p in good]
            parts = [_buffer(t) for t in (*(a for a, _ in rows), *(f for _, f in rows), torch.tensor(starts), *ids)]
        path = self.folder / store.batch_name(header.rows)
        temporary = path.with_suffix(".tmp")
        try:
            with open(temporary, "wb") as file:
                file.write(head)
                for data in parts:
                    file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        self.bytes_written += len(head) + sum(data.nbytes for data in parts)

    @staticmethod
    def _validate(peaks: Tensor) -> None:
        broken = (~torch.isfinite(peaks)).nonzero().flatten().tolist()
        if broken:
            raise ValueError(
                f"NaN or infinite hidden state at {len(broken)} of {len(peaks)} tokens, the first at token {broken[0]}"
            )
        zero = (peaks == 0).nonzero().flatten().tolist()
        if zero:
            raise ValueError(
                f"all-zero hidden state at {len(zero)} of {len(peaks)} tokens, the first at token {zero[0]}"
            )

    def drain(self) -> None:
        """Wait until everything submitted is written; raise what a writer raised."""
        with self._changed:
            self._changed.wait_for(lambda: not self._writing)
        if self.error is not None:
            raise self.error


def _buffer(tensor: Tensor) -> memoryview:
    # By way of uint8, since numpy knows no bfloat16.
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
