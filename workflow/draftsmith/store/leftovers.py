"""What lies in a store and is read by nobody: staging folders, damaged files. Removed by request alone."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from draftsmith.errors import DraftsmithError
from draftsmith.store.format import SUFFIX
from draftsmith.store.verification import DAMAGED

STAGING = ".staging"
# As extract_shard names them: shard, then host, place and process id.
_SHARD = r"\d+-of-\d+"


class Leftover(BaseModel):
    """A file or folder with its size in bytes."""

    kind: Literal["staging", "damaged", "fingerprint"]
    path: Path
    bytes: int
    removable: bool
    note: str


def size(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; links are not followed, and what has just gone has none."""
    if not path.is_dir() or path.is_symlink():
        try:
            return path.lstat().st_size
        except FileNotFoundError:
            return 0
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                # Its owner is at work.
                continue
    return total


def staging(folder: Path) -> list[Leftover]:
    """Staging folders in the folder of a fingerprint; those may go whose process, of this host, is gone."""
    found = []
    for path in sorted((folder / STAGING).glob("*")):
        removable, note = _owner(path)
        bytes_ = size(path)
        # Its owner may have ended since it was listed.
        if os.path.lexists(path):
            found.append(Leftover(kind="staging", path=path, bytes=bytes_, removable=removable, note=note))
    return found


def _owner(path: Path) -> tuple[bool, str]:
    # Not at the head: `draftsmith --help` imports this module, and psutil takes its time.
    from draftsmith.processes.owned_folders import owner

    found = owner(path, _SHARD)
    return (False, "not named like a staging folder of extract_shard") if found is None else (found.gone, found.note)


def damaged(folder: Path) -> list[Leftover]:
    """Damaged files in the folder of a fingerprint, with the reason."""
    found = []
    for path in sorted((folder / DAMAGED).glob(f"*{SUFFIX}")):
        why = path.with_suffix(".txt")
        try:
            note = why.read_text().strip()
        except OSError:
            # The reason comes after the file.
            note = "the reason is not noted"
        found.append(Leftover(kind="damaged", path=path, bytes=size(path), removable=True, note=note))
    return found


def fingerprint(folder: Path) -> Leftover:
    """The whole folder of a fingerprint; it stays while an extraction may be writing to it."""
    if folder.is_symlink():
        return Leftover(
            kind="fingerprint", path=folder, bytes=0, removable=False, note="it is a link: remove it by hand"
        )
    busy = next((item for item in staging(folder) if not item.removable), None)
    note = "" if busy is None else f"{busy.path} is {busy.note}"
    return Leftover(kind="fingerprint", path=folder, bytes=size(folder), removable=busy is None, note=note)


def remove(item: Leftover, store: Path) -> None:
    """Delete a leftover, after another look at whose it is.

    Raises :class:`DraftsmithError` when it is a link, does not lie in ``store``, or belongs to a process that may be alive,
    :class:`OSError` when it cannot be deleted.
    """
    path = item.path
    if not path.is_symlink() and path.resolve() == store.resolve():
        raise DraftsmithError(
            f"{path}: is the folder of one fingerprint; to remove it, name the store, {path.resolve().parent}"
        )
    if path.is_symlink() or store.resolve() not in path.resolve().parents:
        raise DraftsmithError(f"{path}: is a link, or does not lie in {store}; remove it by hand")
    if item.kind == "staging":
        removable, note = _owner(path)
        if not removable:
            raise DraftsmithError(f"{path}: is {note}; it stays")
    if item.kind == "fingerprint" and not (now := fingerprint(path)).removable:
        raise DraftsmithError(f"{path}: stays, as {now.note}")
    if path.is_dir():
        shutil.rmtree(path, onerror=_passing_over_what_is_gone)
        return
    path.unlink(missing_ok=True)
    path.with_suffix(".txt").unlink(missing_ok=True)


def _passing_over_what_is_gone(_: Any, path: str, error: tuple[type[BaseException], BaseException, Any]) -> None:
    if not isinstance(error[1], FileNotFoundError):
        raise error[1]
