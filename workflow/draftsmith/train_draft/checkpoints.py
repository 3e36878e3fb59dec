"""Checkpoints that are complete or not there.

transformers' Trainer writes a checkpoint in several files, into ``.saving``. When all are on the disk they get ``complete.json``,
which lists each with its size and hash, and the folder takes its name ``checkpoint-STEP`` in one step. A folder of that name
whose files are not what its list says is damaged: it is passed over and removed, and the one before it is used. One of another
training, whose notes name another fingerprint than the folder's, or another step, or that has no notes, is passed over and
left alone. Only folders of these names are ever deleted.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Iterator
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


def foreign(checkpoint: Path) -> str | None:
    """Why a checkpoint whose list can be read is not this folder's; None where it is, as one without a fingerprint may be.

    Versions before this one noted neither fingerprint nor step.
    """
    try:
        noted = read_json(checkpoint / _MARK)
    except (DraftsmithError, OSError):
        return None
    if not isinstance(noted, dict) or "files" not in noted:
        return None
    if not isinstance(noted.get("notes"), dict):
        return f"{_MARK} has no notes"
    key, step = (noted["notes"].get(name) for name in ("fingerprint", "step"))
    if key not in (None, checkpoint.parent.name):
        return f"it is of another training ({key})"
    return None if step in (None, step_of(checkpoint)) else f"it is of step {step}"


def fault(checkpoint: Path, read: bool = True) -> str | None:
    """What is wrong with a checkpoint; None where it is this folder's, and every file is there in full and, if it may be ``read``, has its hash."""
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
    return foreign(checkpoint)


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoint folders, oldest step first, complete or not."""
    found = [path for path in folder.glob("checkpoint-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def sound(folder: Path) -> Iterator[Path]:
    """The complete checkpoints, newest step first, each with every byte read when it is asked for."""
    return (path for path in reversed(checkpoints(folder)) if fault(path) is None)


def newest(folder: Path) -> Path | None:
    """The checkpoint of the highest step that is complete, every byte of it read."""
    return next(sound(folder), None)


def remove_broken(folder: Path) -> list[str]:
    """Delete what a killed process left half-written and what is damaged up to the newest sound one.

    Returns a line for each of them, and for each checkpoint of another training.
    """
    shutil.rmtree(folder / STAGING, ignore_errors=True)
    lines, read = [], True
    for path in reversed(checkpoints(folder)):
        alien = foreign(path)
        if alien is not None:
            lines.append(f"{path}: {alien}; it is passed over and left alone")
            continue
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
        if foreign(final) is None:
            remove(final)
        else:
            os.rename(final, folder / f"{final.name}-of-another-training-{uuid.uuid4().hex[:8]}")
    os.rename(staged, final)
    fsync_folder(folder)
    return final


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint; one that is half deleted is already incomplete."""
    (checkpoint / _MARK).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def keep_newest(folder: Path, limit: int, last: int | None = None) -> None:
    """Delete all but the newest ``limit`` complete checkpoints; those beyond step ``last`` neither count nor go."""
    for path in [
        path
        for path in checkpoints(folder)
        if (last is None or step_of(path) <= last) and fault(path, read=False) is None
    ][:-limit]:
        remove(path)


def _digest(path: Path) -> str:
    hasher = xxhash.xxh3_64()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(1 << 24):
            hasher.update(chunk)
    return hasher.hexdigest()
