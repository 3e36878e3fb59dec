"""Checkpoints that are complete or not there.

transformers' Trainer writes a checkpoint in several files, into ``.saving``. When all are on the disk they get ``complete.json``,
which lists each with its size and hash, and the folder takes its name ``checkpoint-STEP`` in one step. A folder of that name
whose files are not what its list says is damaged: it is passed over and removed, and the one before it is used. Only folders of
these names are ever deleted.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import xxhash

from draftsmith.errors import DraftsmithError
from draftsmith.files import fsync_folder, read_json, write_json

STAGING = ".saving"
_MARK = "complete.json"
_NAME = re.compile(r"checkpoint-(\d+)")


def step_of(checkpoint: Path) -> int:
    """The optimiser step that a checkpoint's folder name tells."""
    match = _NAME.fullmatch(checkpoint.name)
    if match is None:
        raise ValueError(f"{checkpoint} is not named like a checkpoint")
    return int(match[1])


def notes(checkpoint: Path) -> dict[str, Any]:
    """What was noted when the checkpoint was finished."""
    return dict(read_json(checkpoint / _MARK)["notes"])


def fault(checkpoint: Path, read: bool = True) -> str | None:
    """What is wrong with a checkpoint; None where every file is there in full and, if it may be ``read``, has its hash."""
    try:
        files = read_json(checkpoint / _MARK)["files"].items()
        for name, (size, digest) in files:
            found = (checkpoint / name).stat().st_size
            if found != size:
                return f"{name} has {found} bytes instead of {size}"
            if read and _digest(checkpoint / name) != digest:
                return f"{name} does not have its checksum"
    except DraftsmithError:
        return f"{_MARK} is missing or not readable"
    except OSError as error:
        return f"{Path(error.filename or checkpoint).name}: {error.strerror}"
    except (KeyError, TypeError, AttributeError, ValueError):
        return f"{_MARK} is not what this version writes"
    return None


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoint folders, oldest step first, complete or not."""
    found = [path for path in folder.glob("checkpoint-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def newest(folder: Path) -> Path | None:
    """The checkpoint of the highest step that is complete, every byte of it read."""
    return next((path for path in reversed(checkpoints(folder)) if fault(path) is None), None)


def remove_broken(folder: Path) -> list[str]:
    """Delete what a killed process left half-written and what is damaged up to the newest sound one; a line for each checkpoint."""
    shutil.rmtree(folder / STAGING, ignore_errors=True)
    lines, read = [], True
    for path in reversed(checkpoints(folder)):
        why = fault(path, read)
        if why is None:
            # Those before it will not be read by this run, and a file of many gigabytes takes its time.
            read = False
        else:
            lines.append(f"{path}: {why}; it is removed, and the checkpoint before it is used")
            remove(path)
    return lines


def publish(staged: Path, folder: Path, noted: dict[str, Any]) -> Path:
    """Give the finished checkpoint ``staged`` its place in ``folder``, after its bytes have reached the disk."""
    files = {}
    for path in sorted(staged.iterdir()):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        files[path.name] = [path.stat().st_size, _digest(path)]
    write_json(staged / _MARK, {"files": files, "notes": noted})
    final = folder / staged.name
    if final.exists():
        remove(final)
    os.rename(staged, final)
    fsync_folder(folder)
    return final


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint; one that is half deleted is already incomplete."""
    (checkpoint / _MARK).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def keep_newest(folder: Path, limit: int) -> None:
    """Delete all but the newest ``limit`` complete checkpoints."""
    for path in [path for path in checkpoints(folder) if fault(path, read=False) is None][:-limit]:
        remove(path)


def _digest(path: Path) -> str:
    hasher = xxhash.xxh3_64()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(1 << 24):
            hasher.update(chunk)
    return hasher.hexdigest()
