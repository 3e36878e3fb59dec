"""Writes full buffers as batch files, beside the engine: validated, with a checksum a row, each complete or absent.

A batch is cut into pieces that several threads hash and write at once, so that the last one of a run takes no longer than the
others. The threads hold the interpreter's lock for microseconds only (hashing, writing and waiting let it go), as the
model's own process launches kernels beside them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from draftsmith import store
from draftsmith.extract_shard.buffers import OpenBatch, Ring

_PIECE = 32 << 20


class Writer:
    """A pool of threads that writes batches into ``folder``."""

    def __init__(self, folder: Path, ring: Ring, threads: int, failed: Callable[..., None]) -> None:
        """``failed(error, rows, stage)`` puts on record what is not written: for 'validate' a row that is wrong, for 'write' a batch."""
        self.folder, self.ring, self.failed = folder, ring, failed
        # A batch waits for its pieces, so the two kinds of work must not share threads.
        self._batches = ThreadPoolExecutor(ring.in_writing, thread_name_prefix="draftsmith-batch")
        self._pieces = ThreadPoolExecutor(threads, thread_name_prefix="draftsmith-piece")
        self.error: BaseException | None = None
        self.bytes_written = 0

    def submit(self, batch: OpenBatch) -> None:
        """Write a complete batch in the background; ``batch.event``, if any, is waited for first."""
        self.ring.taken()
        self._batches.submit(self._run, batch)

    def drain(self) -> None:
        """Wait until everything submitted is written; raise what a thread raised."""
        self.ring.wait_idle()
        if self.error is not None:
            raise self.error

    def _run(self, batch: OpenBatch) -> None:
        try:
            self._write(batch)
        except BaseException as error:
            self.error = self.error or error
            # On a full disk the record cannot be written either; the error itself reaches the driver by way of `error`.
            with suppress(OSError):
                self.failed(error, batch.row_ids, "write")
        finally:
            self.ring.release(batch)

    def _write(self, batch: OpenBatch) -> None:
        if batch.event is not None:
            batch.event.synchronize()
        good = []
        for place, row in enumerate(batch.row_ids):
            try:
                _validate(batch.peaks[batch.row(place)])
                good.append(place)
            except ValueError as error:
                self.failed(error, [row], "validate")
        if not good:
            return
        checksums = list(
            self._pieces.map(lambda place: store.checksum(*store.row_parts(batch.views, batch.row(place))), good)
        )
        header = self.ring.header([batch.row_ids[p] for p in good], [batch.lengths[p] for p in good], checksums)
        head, places = store.layout(header)
        size = max(at + length for at, length in places.values())
        path = self.folder / store.batch_name(header.rows)
        temporary = path.with_suffix(".tmp")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                pieces = [(0, memoryview(head)), *self._parts(batch, good, header, len(head), places)]
                for written in [self._pieces.submit(_write_all, descriptor, *piece) for piece in pieces]:
                    written.result()
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        self.bytes_written += size

    def _parts(
        self,
        batch: OpenBatch,
        good: list[int],
        header: store.BatchHeader,
        start: int,
        places: dict[str, tuple[int, int]],
    ) -> Iterator[tuple[int, memoryview]]:
        """(position in the file, bytes) of the data part."""
        if len(good) == len(batch.row_ids):
            data = store.buffer(batch.buffer.data[: max(at + size for at, size in places.values()) - start])
            for at in range(0, len(data), _PIECE):
                yield start + at, data[at : at + _PIECE]
            return
        # Without the rows that failed.
        for name, (at, _) in places.items():
            if name == "offsets":
                yield at, store.buffer(torch.tensor([0, *torch.tensor(header.lengths).cumsum(0).tolist()]))
                continue
            for place in good:
                part: Tensor = batch.views[name][batch.row(place)]
                yield at, store.buffer(part)
                at += part.nbytes


def _write_all(descriptor: int, at: int, data: memoryview) -> None:
    while data:
        written = os.pwrite(descriptor, data, at)
        data, at = data[written:], at + written


def _validate(peaks: Tensor) -> None:
    broken = (~torch.isfinite(peaks)).nonzero().flatten().tolist()
    if broken:
        raise ValueError(
            f"NaN or infinite hidden state at {len(broken)} of {len(peaks)} tokens, the first at token {broken[0]}"
        )
    zero = (peaks == 0).nonzero().flatten().tolist()
    if zero:
        raise ValueError(f"all-zero hidden state at {len(zero)} of {len(peaks)} tokens, the first at token {zero[0]}")
