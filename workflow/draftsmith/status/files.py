"""Reading files that somebody else is writing: what is missing, half-written or unreadable is None, never an error."""

from __future__ import annotations

import csv
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

# A shard's manifest names every row; beyond this it is left alone, so that the answer comes at once.
_MOST_BYTES = 8 << 20
_TAIL_BYTES = 64 << 10
_ERROR = re.compile(r"^\d\d:\d\d:\d\d error: (.*)$")
_TRACEBACK = "Traceback (most recent call last):"


def mtime(path: Path) -> float | None:
    """When a file was last written; None when there is none."""
    with suppress(OSError):
        return path.stat().st_mtime
    return None


def json_object(path: Path, most_bytes: int | None = None) -> dict[str, Any] | None:
    """The object in a JSON file of a few megabytes, or of at most so many bytes."""
    with suppress(OSError, ValueError, RecursionError):
        if path.stat().st_size <= (most_bytes or _MOST_BYTES):
            value = json.loads(path.read_text())
            return value if isinstance(value, dict) else None
    return None


def tail(path: Path) -> list[str]:
    """The last lines of a text."""
    with suppress(OSError), open(path, "rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - _TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()
    return []


def last_error(log: Path) -> str | None:
    """The first line of the error that a rule's log ends with; of a traceback the line that says what it was."""
    lines = tail(log)
    for place in range(len(lines) - 1, -1, -1):
        if match := _ERROR.match(lines[place]):
            if match[1] != _TRACEBACK:
                return match[1]
            # Frames are indented, and so are the lines of code under them.
            told = (line for line in lines[place + 1 :] if line.strip() and not line.startswith((" ", _TRACEBACK)))
            return next(told, _TRACEBACK)
    return None


def benchmark_seconds(path: Path) -> float | None:
    """Wall seconds of the last run in one of Snakemake's benchmark files."""
    with suppress(OSError, ValueError, KeyError, TypeError, csv.Error), open(path, newline="") as file:
        lines = list(csv.DictReader(file, delimiter="\t"))
        return float(lines[-1]["s"]) if lines else None
    return None
