"""Reading files that somebody else is writing: what is missing, half-written or unreadable is None, never an error."""

from __future__ import annotations

import csv
import itertools
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from draftsmith.errors import opening

# A shard's manifest names every row; beyond this it is left alone, so that the answer comes at once.
_MOST_BYTES = 8 << 20
_TAIL_BYTES = 64 << 10
_ERROR = re.compile(r"^\d\d:\d\d:\d\d error: (.*)$")
_STAMPED = re.compile(r"^\d\d:\d\d:\d\d ")
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


def tail(path: Path, most_bytes: int = _TAIL_BYTES) -> list[str]:
    """The last lines of a text, of at most so many bytes."""
    with suppress(OSError), open(path, "rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - most_bytes))
        return file.read().decode(errors="replace").splitlines()
    return []


def last_error(log: Path) -> str | None:
    """The first line of the error that a rule's log ends with, and what it announces; of a traceback the line that says what it was."""
    lines = tail(log)
    for place in range(len(lines) - 1, -1, -1):
        if match := _ERROR.match(lines[place]):
            after = lines[place + 1 :]
            if match[1] != _TRACEBACK:
                # What is logged later is no part of it.
                own = itertools.takewhile(lambda line: not _STAMPED.match(line), after)
                return opening([match[1], *own])
            # Frames are indented, and so are the lines of code under them.
            told = (n for n, line in enumerate(after) if line.strip() and not line.startswith((" ", _TRACEBACK)))
            first = next(told, None)
            return _TRACEBACK if first is None else opening(after[first:])
    return None


def benchmark_seconds(path: Path) -> float | None:
    """Wall seconds of the last run in one of Snakemake's benchmark files."""
    with suppress(OSError, ValueError, KeyError, TypeError, csv.Error), open(path, newline="") as file:
        lines = list(csv.DictReader(file, delimiter="\t"))
        return float(lines[-1]["s"]) if lines else None
    return None
