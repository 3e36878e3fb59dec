"""Batch buffers in host memory, filled by the model's process.

A buffer has the layout of the data part of a batch file, so a full one is written as it lies. There are only as many as
batches are open or being written: a slow disk slows the engine, it never fills the memory.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftsmith import store


@dataclass(frozen=True)
class Buffer:
    """Memory for one batch: the data part of its file, and a number a token that is only looked at."""

    data: Tensor  # uint8
    peaks: Tensor  # float32


@dataclass
class OpenBatch:
    """A batch whose rows are arriving. ``row_ids`` and ``lengths`` are parallel."""

    row_ids: list[str]
    lengths: list[int]
    buffer: Buffer
    views: dict[str, Tensor]
    """The tensors of a batch file, as :func:`draftsmith.store.shapes` names them, in the buffer."""
    peaks: Tensor
    """[T] float32: the smallest over a token's states of the largest \\|x\\|; NaN or inf where a state is."""
    starts: list[int]
    filled: list[int] = field(default_factory=list)
    event: Any = None

    @property
    def complete(self) -> bool:
        """Whether every row has all its tokens."""
        return self.filled == self.lengths

    def row(self, place: int) -> slice:
        """Where the tokens of the row at ``place`` lie."""
        return slice(self.starts[place], self.starts[place] + self.lengths[place])


class Ring:
    """Hands out buffers, and waits while too many are being written."""

    def __init__(
        self, header: Callable[..., store.BatchHeader], capacity: int, tokens: int, pinned: bool, in_writing: int
    ) -> None:
        """``header(rows, lengths, checksums)`` makes a batch's header; ``capacity`` is a buffer's size in bytes, ``tokens`` in tokens."""
        self.header, self.capacity, self.tokens, self.pinned, self.in_writing = (
            header,
            capacity,
            tokens,
            pinned,
            in_writing,
        )
        self._free: list[Buffer] = []
        self._writing = 0
        self._changed = threading.Condition()
        self.made = 0
        self.blocked_seconds = 0.0

    def open(self, row_ids: list[str], lengths: list[int]) -> OpenBatch:
        """A buffer for a batch; waits while the writers are behind."""
        import time

        begun = time.perf_counter()
        with self._changed:
            # Waiting is safe only while a write will end and free a buffer: rows of an open batch come from the very engine that waits here.
            self._changed.wait_for(lambda: self._free or self._writing < self.in_writing)
            buffer = self._free.pop() if self._free else None
        self.blocked_seconds += time.perf_counter() - begun
        buffer = buffer or self._make()
        header = self.header(row_ids, lengths, ["0" * 16] * len(row_ids))
        head, places = store.layout(header)
        views = store.tensors(header, places, lambda at, size: buffer.data[at - len(head) : at - len(head) + size])
        starts = list(itertools.accumulate(lengths, initial=0))
        views["offsets"].copy_(torch.tensor(starts))
        return OpenBatch(
            row_ids, lengths, buffer, views, buffer.peaks[: header.tokens], starts, filled=[0] * len(row_ids)
        )

    def _make(self) -> Buffer:
        self.made += 1
        return Buffer(
            torch.empty(self.capacity, dtype=torch.uint8, pin_memory=self.pinned),
            torch.empty(self.tokens, dtype=torch.float32, pin_memory=self.pinned),
        )

    def prepare(self, count: int) -> None:
        """Make ``count`` buffers ahead: pinning memory stops the GPU, so it is done before the first step."""
        self._free += [self._make() for _ in range(count)]

    def taken(self) -> None:
        """A buffer has gone to the writers."""
        with self._changed:
            self._writing += 1

    def release(self, batch: OpenBatch) -> None:
        """A buffer is free again."""
        with self._changed:
            self._writing -= 1
            self._free.append(batch.buffer)
            self._changed.notify_all()

    def wait_idle(self) -> None:
        """Wait until nothing is being written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._writing)
