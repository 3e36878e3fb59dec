"""Rows that may have broken the engine: they are tried again, later and alone, a bounded number of times.

When a step fails, every row in it is suspected; only a row that was alone in the engine is known to be guilty. Suspicions of
earlier runs are read from the ledger, so that the next run leaves its suspects for the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from draftsmith.extract_shard import ledger
from draftsmith.extract_shard.plan import PlannedRow

Entry = dict[str, Any]


class Tries:
    """How often each row has failed, and how."""

    def __init__(self, limit: int, suspected: Iterable[str] = ()) -> None:
        self.limit = limit
        self._count = dict.fromkeys(suspected, 1)
        self.quarantined: dict[str, Entry] = {}

    def blame(self, rows: Iterable[str], entry: Entry, certain: bool) -> None:
        """Count a failure of ``rows``; ``certain`` ones, known to be its cause, are left out once they have used up their tries."""
        for row in rows:
            self._count[row] = self._count.get(row, 0) + 1
            if certain and self._count[row] >= self.limit:
                self.quarantined[row] = entry

    def split(self, rows: Sequence[PlannedRow]) -> tuple[list[PlannedRow], list[PlannedRow]]:
        """(rows without a suspicion, rows to be tried alone); those that are left out are in neither."""
        free = [row for row in rows if row.row_id not in self._count]
        alone = [row for row in rows if row.row_id in self._count and row.row_id not in self.quarantined]
        return free, alone


def suspects(entries: Sequence[Entry], running: Sequence[str]) -> list[str]:
    """Rows to suspect after a crash: those of the first recorded step, or all that the engine had, if nothing was recorded.

    None when the model itself cannot be read.
    """
    # Here, as it brings torch, and others look at a plan without.
    from draftsmith.extract_shard.capture import Unreadable

    for entry in entries:
        if entry["type"] == Unreadable.__name__:
            return []
        if entry.get("stage") == "step" and entry.get("rows"):
            return list(entry["rows"])
    return list(running)


def remembered(folder: Path) -> set[str]:
    """Rows suspected by earlier runs on this store."""
    return {row for path in (folder / ".ledger").glob("*.json") for row in ledger.suspects_in(path)}
