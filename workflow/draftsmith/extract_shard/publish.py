"""From a batch file that a worker wrote to one that the store vouches for.

A staged file is published, by a rename, only when its token ids are the rows' own and the last state of some of its rows
gives, by the checkpoint's own head, the token that the engine sampled: one test that fails for a missing or doubled
norm, a final state of another layer, rows in a wrong order and a wrong precision alike.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith import store
from draftsmith.errors import DraftsmithError
from draftsmith.extract_shard import ledger
from draftsmith.files import fsync_folder
from draftsmith.log import log
from draftsmith.store.verification import Journal
from draftsmith.target_weights import head_weight

if TYPE_CHECKING:
    from torch import Tensor

# Relative to the largest logit: how far below it the engine's token may be. The engine multiplies in the target's precision.
_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 4e-3, "fp8": 1e-1}
# The largest share of the time that comparing with the whole head may take: one of 160,000 tokens is 2 GB to read. Beyond
# it, and beyond so many states at once, a state is compared with tokens drawn from the head: a wrong one passes by chance
# only, once in so many.
_CHECK_SHARE = 0.1
_AT_ONCE = 16
_DRAWN = 4096


class HeadCheck:
    """Compares final states with sampled tokens by the checkpoint's head."""

    def __init__(self, folder: Path, precision: str) -> None:
        """``precision`` is that of the stored states: a dtype's name, or 'fp8'."""
        self._folder, self._tolerance = folder, _TOLERANCE[precision]
        self._double = precision == "float32"
        self._head: Tensor | None = None
        self.available = True

    def _load(self) -> None:
        try:
            head = head_weight(self._folder)
        except DraftsmithError as error:
            self.available = False
            log(f"extract: the engine's tokens are not compared with the states: {error}")
            return
        self.available = head.is_floating_point() and head.element_size() >= 2
        self._head = head.float() if self._double else head

    def disagreements(self, finals: Tensor, sampled: list[int], whole: bool = True) -> list[str | None]:
        """For each state of ``finals`` [N, H] why it cannot have given the greedy token in ``sampled``; None when it can.

        With ``whole`` against all tokens of the head, otherwise against 4096 drawn ones.
        """
        import torch

        if self._head is None and self.available:
            self._load()
        if self._head is None or not sampled:
            return [None] * len(sampled)
        tokens = len(self._head)
        if whole or tokens <= _DRAWN:
            names, head = torch.arange(tokens), self._head
        else:
            drawn = torch.randperm(tokens, generator=torch.Generator().manual_seed(0))[:_DRAWN]
            names = torch.cat(
                [drawn, torch.tensor([token for token in sampled if 0 <= token < tokens], dtype=torch.long)]
            )
            head = self._head[names]
        logits = (finals.to(head.dtype) @ head.T).float()
        return [self._compare(row, token, names) for row, token in zip(logits, sampled, strict=True)]

    def _compare(self, logits: Tensor, token: int, names: Tensor) -> str | None:
        assert self._head is not None
        place = (names == token).nonzero()
        if not len(place):
            return f"the engine sampled token {token}, the head has {len(self._head)}"
        highest = int(logits.argmax())
        best, scale = int(names[highest]), float(logits.abs().max())
        gap = float(logits[highest] - logits[int(place[0])])
        # Not `gap > …`: a NaN must fail.
        if gap <= self._tolerance * scale:
            return None
        return f"lm_head of the stored final state gives token {best}, the engine sampled {token} ({gap:.4g} lower, of {scale:.4g})"


class Publisher(threading.Thread):
    """Watches the staging folder and publishes what is right, beside the driver's loop."""

    def __init__(
        self, staging: Path, folder: Path, check: HeadCheck | None, verify_rows: int, interval: float = 0.1
    ) -> None:
        super().__init__(name="draftsmith-publisher", daemon=True)
        self.staging, self.folder, self.interval = staging, folder, interval
        self.check, self.verify_rows = check, verify_rows if check is not None else 0
        self.sampled: dict[str, int] = {}
        self.published: set[str] = set()
        self.failed: dict[str, dict[str, Any]] = {}
        self.batches = self.bytes = self.tokens = 0
        self.error: BaseException | None = None
        self._journal = Journal(folder)
        self._checking, self._begun = 0.0, time.perf_counter()
        self._end = threading.Event()
        self._scanning = threading.Lock()

    def run(self) -> None:
        """Scan until :meth:`finish`."""
        try:
            while not self._end.wait(self.interval):
                self.scan()
        except BaseException as error:
            self.error = error

    def settle(self) -> None:
        """Publish what is there now; raise what went wrong in the thread."""
        if self.error is not None:
            raise self.error
        self.scan()

    def finish(self) -> None:
        """Stop the thread and look a last time."""
        self._end.set()
        if self.is_alive():
            self.join()
        self.settle()

    def scan(self) -> None:
        """Publish every staged file whose rows have been answered by the engine."""
        with self._scanning:
            ready = []
            for path in sorted(self.staging.glob(f"*{store.SUFFIX}")):
                batch = store.open_batch(path)
                if all(row in self.sampled for row in batch.header.rows[: self.verify_rows]):
                    ready.append(batch)
            for batch, reason in zip(ready, self._check(ready), strict=True):
                self._publish(batch, reason or _foreign_ids(batch))

    def _check(self, batches: list[store.BatchFile]) -> list[str | None]:
        import torch

        places = [(batch, place) for batch in batches for place in range(min(self.verify_rows, len(batch.header.rows)))]
        if self.check is None or not places:
            return [None] * len(batches)
        finals = torch.stack([batch.last_state(place) for batch, place in places])
        sampled = [self.sampled[batch.header.rows[place]] for batch, place in places]
        begun = time.perf_counter()
        whole = _AT_ONCE if self._checking <= _CHECK_SHARE * (begun - self._begun) else 0
        found = self.check.disagreements(finals[:whole], sampled[:whole])
        found += self.check.disagreements(finals[whole:], sampled[whole:], whole=False)
        self._checking += time.perf_counter() - begun
        reasons: dict[Path, str] = {}
        for (batch, place), reason in zip(places, found, strict=True):
            if reason is not None:
                reasons.setdefault(batch.path, f"{batch.path.name}, row {batch.header.rows[place]}: {reason}")
        return [reasons.get(batch.path) for batch in batches]

    def _publish(self, batch: store.BatchFile, reason: str | None) -> None:
        header, path = batch.header, batch.path
        if reason is not None:
            try:
                raise ValueError(reason)
            except ValueError as error:
                entry = ledger.record(self.staging / "errors", error, stage="publish", rows=header.rows)
            log(ledger.text(entry))
            self.failed.update(dict.fromkeys(header.rows, entry))
            path.unlink()
            return
        target, size = self.folder / path.name, path.stat().st_size
        os.replace(path, target)
        fsync_folder(self.folder)
        self._journal.add(target)
        for row in header.rows:
            self.failed.pop(row, None)
        self.published.update(header.rows)
        self.batches += 1
        self.tokens += header.tokens
        self.bytes += size


def _foreign_ids(batch: store.BatchFile) -> str | None:
    """Why the token ids that the engine saw are not the rows' own; a row's id is their hash."""
    for place, row in enumerate(batch.header.rows):
        if store.row_id(batch.token_ids(place).numpy()) != row:
            return f"{batch.path.name}, row {row}: the engine saw other token ids than the row has"
    return None
