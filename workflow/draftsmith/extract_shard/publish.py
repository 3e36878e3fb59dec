"""From a batch file that a worker wrote to one that the store vouches for.

A staged file is published, by a rename, only when its token ids are the rows' own and the last state of some of its rows
gives, by the checkpoint's own head, the token that the engine sampled: one test that fails for a missing or doubled
norm, a final state of another layer, rows in a wrong order and a wrong precision alike.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith import store
from draftsmith.errors import DraftsmithError
from draftsmith.extract_shard import ledger
from draftsmith.files import fsync_folder
from draftsmith.log import log
from draftsmith.target_weights import head_weight

if TYPE_CHECKING:
    from torch import Tensor

# Relative to the largest logit: how far below it the engine's token may be. The engine multiplies in the target's precision.
_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 4e-3}


class HeadCheck:
    """Compares final states with sampled tokens by the checkpoint's head."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self._folder, self._dtype = folder, dtype
        self._head: Tensor | None = None
        self.available = True

    def disagreement(self, final: Tensor, sampled: int) -> str | None:
        """Why state ``final`` [H] cannot have given the greedy token ``sampled``; None when it can."""
        if self._head is None and self.available:
            try:
                head = head_weight(self._folder)
                self.available = head.is_floating_point() and head.element_size() >= 2
                self._head = head if self.available else None
            except DraftsmithError as error:
                self.available = False
                log(f"the engine's tokens are not compared with the states: {error}")
        if self._head is None:
            return None
        if not 0 <= sampled < self._head.shape[0]:
            return f"the engine sampled token {sampled}, the head has {self._head.shape[0]}"
        logits = (
            (self._head.to(final.dtype) @ final).float()
            if self._dtype != "float32"
            else self._head.float() @ final.float()
        )
        best = int(logits.argmax())
        scale = float(logits.abs().max())
        gap = float(logits[best] - logits[sampled])
        if gap <= _TOLERANCE[self._dtype] * scale:
            return None
        return f"lm_head of the stored final state gives token {best}, the engine sampled {sampled} ({gap:.4g} lower, of {scale:.4g})"


class Publisher(threading.Thread):
    """Watches the staging folder and publishes what is right, beside the driver's loop."""

    def __init__(
        self, staging: Path, folder: Path, check: HeadCheck | None, verify_rows: int, interval: float = 0.2
    ) -> None:
        super().__init__(name="draftsmith-publisher", daemon=True)
        self.staging, self.folder, self.check, self.verify_rows, self.interval = (
            staging,
            folder,
            check,
            verify_rows,
            interval,
        )
        self.sampled: dict[str, int] = {}
        self.published: set[str] = set()
        self.failed: dict[str, dict[str, Any]] = {}
        self.batches = self.bytes = self.tokens = 0
        self.error: BaseException | None = None
        self._end = threading.Event()

    def run(self) -> None:
        """Scan until :meth:`finish`."""
        try:
            while not self._end.wait(self.interval):
                self.scan()
        except BaseException as error:
            self.error = error

    def finish(self) -> None:
        """Stop the thread, look a last time, and raise what went wrong in it."""
        self._end.set()
        if self.is_alive():
            self.join()
        if self.error is not None:
            raise self.error
        self.scan()

    def scan(self) -> None:
        """Publish every staged file whose rows have been answered by the engine."""
        for path in sorted(self.staging.glob(f"*{store.SUFFIX}")):
            header, _ = store.read_header(path)
            if all(row in self.sampled for row in header.rows[: self.verify_rows]):
                self._publish(path)

    def _publish(self, path: Path) -> None:
        batch = store.open_batch(path)
        header = batch.header
        for place, row in enumerate(header.rows):
            try:
                # Compares the token ids, whose hash the row's id is, and the checksum of what the disk gives back.
                states = batch.row(place)
                if self.check is not None and place < self.verify_rows:
                    reason = self.check.disagreement(states.final[-1], self.sampled[row])
                    if reason is not None:
                        raise ValueError(f"{path.name}, row {row}: {reason}")
            except (ValueError, store.StoreError) as error:
                entry = ledger.record(self.staging / "errors", error, stage="publish", rows=header.rows)
                log(ledger.text(entry))
                self.failed.update(dict.fromkeys(header.rows, entry))
                path.unlink()
                return
        os.replace(path, self.folder / path.name)
        fsync_folder(self.folder)
        self.published.update(header.rows)
        self.batches += 1
        self.tokens += header.tokens
        self.bytes += (self.folder / path.name).stat().st_size
