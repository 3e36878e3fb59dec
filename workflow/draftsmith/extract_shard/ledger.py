"""Errors that keep their traceback, from whichever process raised them."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from draftsmith.errors import DraftsmithError
from draftsmith.files import read_json, write_json

# Names the folder of records to every process of the engine.
ERRORS = "DRAFTSMITH_ERRORS"
ROW_STAGES = ("validate", "publish")
"""Stages whose records tell of rows that were refused; the engine is well and goes on."""
_ROWS_SHOWN = 5


def describe(error: BaseException, **where: Any) -> dict[str, Any]:
    """An exception as plain data: type, message, whole traceback, time, process, and what ``where`` adds (rank, stage, rows)."""
    return {
        "time": time.time(),
        "pid": os.getpid(),
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        **where,
    }


def record(folder: Path, error: BaseException, **where: Any) -> dict[str, Any]:
    """Write ``error`` into ``folder`` as a JSON file of its own and return what was written."""
    entry = describe(error, **where)
    write_json(folder / f"{time.time_ns()}-{os.getpid()}.json", entry)
    return entry


def read(folder: Path) -> list[dict[str, Any]]:
    """All recorded errors, the earliest first: it is the cause, the later ones are mostly its echoes."""
    return [read_json(path) for path in sorted(folder.glob("*.json"))]


def of_engine(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records that mean that the engine has failed."""
    return [entry for entry in entries if entry["stage"] not in ROW_STAGES]


def keep(folder: Path, entries: Sequence[dict[str, Any]], suspects: Sequence[str]) -> Path | None:
    """Put a crash into the store's own ledger, ``folder/.ledger``; None when the disk takes no more."""
    path = folder / ".ledger" / f"{time.time_ns()}-{os.getpid()}.json"
    with suppress(OSError):
        write_json(path, {"suspects": list(suspects), "errors": list(entries)})
        return path
    return None


def suspects_in(path: Path) -> list[str]:
    """Suspected rows of an entry that :func:`keep` wrote; none where it cannot be read."""
    with suppress(DraftsmithError, OSError, KeyError, TypeError):
        return list(read_json(path)["suspects"])
    return []


def text(entry: dict[str, Any]) -> str:
    """An entry for a person to read: where it happened, then the traceback."""
    rows = entry.get("rows") or []
    more = f" and {len(rows) - _ROWS_SHOWN} more" if len(rows) > _ROWS_SHOWN else ""
    where = [f"{key} {entry[key]}" for key in ("stage", "rank") if entry.get(key) is not None]
    where += [f"rows {', '.join(rows[:_ROWS_SHOWN])}{more}"] if rows else []
    return f"--- {entry['type']} ({', '.join(where) or 'driver'}) ---\n{entry['traceback'].rstrip()}"


def cause_last(entries: Sequence[dict[str, Any]]) -> str:
    """All entries for a person to read: the last lines of a terminal are read first, so the earliest comes last."""
    return "\n".join(text(entry) for entry in reversed(entries))
