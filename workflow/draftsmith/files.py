"""Files that are either complete or absent."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from draftsmith.errors import DraftsmithError


def at_home(path: str) -> Path:
    """``path`` with a leading ~ as a shell has it; that of a user who is not there stays, to be told of as a missing folder."""
    return Path(os.path.expanduser(path))


def fsync_folder(folder: Path) -> None:
    """Make a rename inside ``folder`` survive a power cut; file systems that cannot are left alone."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def atomic_path(path: Path, *, synced: bool = True) -> Iterator[Path]:
    """Give a temporary path beside ``path``; it takes the name ``path`` only when the block ends well.

    Unless ``synced``, it is whole for every process, but not forced to the disk: a power cut may lose it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield temporary
        if synced:
            with open(temporary, "rb") as written:
                os.fsync(written.fileno())
        os.replace(temporary, path)
        if synced:
            fsync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON, atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read JSON; a missing or broken file is a :class:`DraftsmithError` that names it."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise DraftsmithError(f"{path}: no such file; the stage that makes it has not run") from None
    except OSError as error:
        raise DraftsmithError(f"{path}: cannot be read ({error.strerror}); make it readable for this user") from None
    except (ValueError, RecursionError) as error:
        raise DraftsmithError(f"{path}: not valid JSON ({error}); delete it and run its stage again") from None


def read_object(path: Path, *keys: str) -> dict[str, Any]:
    """Read a JSON object that has ``keys``; any other content is a :class:`DraftsmithError` that names the file, and the key it lacks."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise DraftsmithError(f"{path}: holds no JSON object; delete it and run its stage again")
    missing = [key for key in keys if key not in found]
    if missing:
        raise DraftsmithError(f"{path}: lacks {', '.join(missing)}; delete it and run its stage again")
    return found


def reason(error: Exception) -> str:
    """What an error of the disk, or of a library that reads or writes there, says, on one line and without the file's name."""
    return " ".join(str(getattr(error, "strerror", None) or error).split())


def free_bytes(place: Path) -> int:
    """Bytes that are free where ``place`` is, or would be."""
    existing = next(folder for folder in (place, *place.absolute().parents) if folder.is_dir())
    return shutil.disk_usage(existing).free


@contextmanager
def writing(place: Path, stage: str) -> Iterator[None]:
    """Turn an error of the disk while something is written to ``place`` into one sentence; ``stage`` is what to run again then."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise DraftsmithError(
            f"{place}: cannot be written ({reason(error)}); make room there ({free_bytes(place) / 2**30:.1f} GiB are free) or let this "
            f"user write to it, and run {stage} again"
        ) from error


def check_writable(folder: Path, key: str) -> None:
    """Fail with one sentence unless files can be made in ``folder`` (created if missing)."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".draftsmith-{uuid.uuid4().hex[:8]}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise DraftsmithError(
            f"{folder}: cannot be written ({error.strerror}); name another folder in the config key {key}"
        ) from None
