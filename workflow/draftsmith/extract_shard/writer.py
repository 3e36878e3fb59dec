"""Writes full buffers as batch files, beside the engine: validated, with a checksum a row, each complete or absent.

A file is written by one thread (the kernel lets only one at a time write to a file), several files at once. The threads hold
the interpreter's lock for microseconds only (hashing, writing and waiting let it go), as the model's own process launches
kernels beside them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith import store
from draftsmith.extract_shard.buffers import OpenBatch, Ring


class Writer:
    """A pool of threads that writes batches into ``folder``."""

    def __init__(self, folder: Path, ring: Ring, threads: int, failed: Callable[..., None]) -> None:
        """``failed(error, rows, stage)`` puts on record what is not written: for 'validate' a row that is wrong, for 'write' a batch."""
        self.folder, self.ring, self.failed = folder, ring, failed
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="draftsmith-writer")
        self.error: BaseException | None = None
        self.bytes_written = 0
        self.seconds = {"copy": 0.0, "checksum": 0.0, "write": 0.0}
        """What the threads spent on waiting for the copy from the GPU, on checksums, and on writing."""

    def submit(self, batch: OpenBatch) -> None:
        """Write a complete batch in the background; ``batch.event``, if any, is waited for first."""
        self.ring.taken()
        self._pool.submit(self._run, batch)

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
        begun = time.perf_counter()
        if batch.event is not None:
            batch.event.synchronize()
        copied = time.perf_counter()
        # NumPy here: in a forked process PyTorch computes in the main thread only.
        peaks = batch.peaks.numpy()
        good = []
        for place, row in enumerate(batch.row_ids):
            try:
                _validate(peaks[batch.row(place)])
                good.append(place)
            except ValueError as error:
                self.failed(error, [row], "validate")
        if not good:
            return
        checksums = [store.checksum(*store.row_parts(batch.views, batch.row(place))) for place in good]
        hashed = time.perf_counter()
        header = self.ring.header([batch.row_ids[p] for p in good], [batch.lengths[p] for p in good], checksums)
        head, places = store.layout(header)
        size = max(at + length for at, length in places.values())
        path = self.folder / store.batch_name(header.rows)
        temporary = path.with_suffix(".tmp")
        try:
            with open(temporary, "wb", buffering=0) as file:
                for data in [memoryview(head), *self._data(batch, good, header, places, size - len(head))]:
                    while data:
                        data = data[file.write(data) :]
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        self.bytes_written += size
        for name, spent in (
            ("copy", copied - begun),
            ("checksum", hashed - copied),
            ("write", time.perf_counter() - hashed),
        ):
            self.seconds[name] += spent

    def _data(
        self,
        batch: OpenBatch,
        good: list[int],
        header: store.BatchHeader,
        places: dict[str, tuple[int, int]],
        size: int,
    ) -> Iterator[memoryview]:
        """The data part, in the order of the file."""
        if len(good) == len(batch.row_ids):
            yield store.buffer(batch.buffer.data[:size])
            return
        # Without the rows that failed.
        for name in places:
            if name == "offsets":
                yield memoryview(np.cumsum([0, *header.lengths], dtype=np.int64).tobytes())
            else:
                yield from (store.buffer(batch.views[name][batch.row(place)]) for place in good)


def _validate(peaks: Any) -> None:
    broken = np.flatnonzero(~np.isfinite(peaks))
    if len(broken):
        raise ValueError(
            f"NaN or infinite hidden state at {len(broken)} of {len(peaks)} tokens, the first at token {broken[0]}"
        )
    zero = np.flatnonzero(peaks == 0)
    if len(zero):
        raise ValueError(f"all-zero hidden state at {len(zero)} of {len(peaks)} tokens, the first at token {zero[0]}")
