"""Checkpoints that are complete or not there.

A checkpoint is a folder ``checkpoint-STEP`` written by transformers' Trainer, in place and in several files. It counts only
once it holds ``complete.json``, written last, which lists every file with its size; whatever ends the process before that
leaves a folder that is passed over and removed. Only folders of that name are ever deleted.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from draftsmith.errors import DraftsmithError
from draftsmith.files import fsync_folder, read_json, write_json

_MARK = "complete.json"
_NAME = re.compile(r"checkpoint-(\d+)")


def step_of(checkpoint: Path) -> int:
    """The optimiser step that a checkpoint's folder name tells."""
    match = _NAME.fullmatch(checkpoint.name)
    if match is None:
        raise ValueError(f"{checkpoint} is not named like a checkpoint")
    return int(match[1])


def complete(checkpoint: Path) -> dict[str, Any] | None:
    """What was noted when the checkpoint was finished; None unless every file is there in its full size."""
    try:
        mark = read_json(checkpoint / _MARK)
        if all((checkpoint / name).stat().st_size == size for name, size in mark["files"].items()):
            return dict(mark["notes"])
    except (DraftsmithError, OSError, KeyError, TypeError, AttributeError, ValueError):
        pass
    return None


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoint folders, oldest step first, complete or not."""
    found = [path for path in folder.glob("checkpoint-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def newest(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step."""
    return next((path for path in reversed(checkpoints(folder)) if complete(path) is not None), None)


def finish(checkpoint: Path, notes: dict[str, Any]) -> None:
    """Declare ``checkpoint`` complete, after its bytes have reached the disk."""
    sizes = {}
    for path in sorted(checkpoint.iterdir()):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        sizes[path.name] = path.stat().st_size
    sizes.pop(_MARK, None)
    write_json(checkpoint / _MARK, {"files": sizes, "notes": notes})
    fsync_folder(checkpoint.parent)


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint; one that is half deleted is already incomplete."""
    (checkpoint / _MARK).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def remove_incomplete(folder: Path) -> list[Path]:
    """Delete what a killed process left half-written, so that a new save of the same step starts clean."""
    broken = [path for path in checkpoints(folder) if complete(path) is None]
    for path in broken:
        remove(path)
    return broken


def keep_newest(folder: Path, limit: int) -> None:
    """Delete all but the newest ``limit`` complete checkpoints."""
    for path in [path for path in checkpoints(folder) if complete(path) is not None][:-limit]:
        remove(path)
