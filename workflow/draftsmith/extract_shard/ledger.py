"""Errors that keep their traceback, from whichever process raised them."""

from __future__ import annotations

import os
import time
import traceback
from pathlib import Path
from typing import Any

from draftsmith.files import read_json, write_json


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


def text(entry: dict[str, Any]) -> str:
    """An entry for a person to read: where it happened, then the traceback."""
    where = ", ".join(f"{key} {entry[key]}" for key in ("stage", "rank", "rows") if entry.get(key) is not None)
    return f"--- {entry['type']} ({where or 'driver'}) ---\n{entry['traceback']}"
