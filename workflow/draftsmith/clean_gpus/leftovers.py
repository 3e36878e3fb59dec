"""Shared memory and socket folders that a run has left behind.

Names in /dev/shm say nothing about who made them. So a stage lists what its engine's processes map, once the engine is
ready, under the run's mark; a file goes only if it is this user's, on the list of a run that is gone, still the same file,
and mapped by nobody.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from draftsmith.errors import DraftsmithError
from draftsmith.files import read_json, write_json
from draftsmith.log import log
from draftsmith.processes import run_mark, scratch
from draftsmith.processes.runtime_folder import runtime_folder

SHARED = "/dev/shm/"
_FOLDER = re.compile(rf"{re.escape(scratch.PREFIX)}(\d+-\d+-[0-9a-f]{{8}})-\w+")
# Lists of another boot or container can never be told to be done with; their files are gone with it.
_OLD_SECONDS = 30 * 86400.0


def remember() -> None:
    """List the shared memory of this process and all below it; call it when an engine is ready.

    That it cannot be listed is told and no reason to give up an engine that took minutes to load.
    """
    pids = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
    since = psutil.Process().create_time()
    files = [entry for entry in sorted(_mapped(pids)) if _made_after(entry[0], since)]
    try:
        write_json(_list(run_mark.mark_run()), {"files": files})
    except (OSError, DraftsmithError) as error:
        log(f"shared memory that this run may leave behind will not be removed: {error}")


def forget() -> None:
    """Remove what this run's engine has not removed itself; call it when the engine has ended."""
    with suppress(OSError, DraftsmithError):
        path = _list(run_mark.mark_run())
        if path.exists():
            _remove_listed(path, _mapped(_own_pids()))


def sweep() -> list[str]:
    """Remove what runs have left that are gone with all their processes; gives the paths."""
    try:
        lists = [path for path in runtime_folder("runs").glob("*.json") if _ended(path.stem)]
    except DraftsmithError as error:
        log(f"clean: what ended runs left in /dev/shm is not looked at: {error}")
        lists = []
    folders = [path for root in scratch.roots() for path in root.glob(f"{scratch.PREFIX}*") if _dead_folder(path)]
    if not lists and not folders:
        return []
    pids = _own_pids()
    alive = {str(marks.stage) for marks in map(run_mark.read, pids) if marks.stage is not None}
    mapped = _mapped(pids)
    removed = [name for path in lists if path.stem not in alive for name in _remove_listed(path, mapped)]
    for path in folders:
        if _FOLDER.fullmatch(path.name)[1] not in alive:  # type: ignore[index]
            shutil.rmtree(path, ignore_errors=True)
            removed.append(str(path))
    if removed:
        log(f"clean: removed {len(removed)} file(s) and folder(s) that ended runs left, the first {removed[0]}")
    return removed


def _made_after(name: str, seconds: float) -> bool:
    with suppress(OSError):
        return os.lstat(name).st_ctime >= seconds - 1
    return False


def _list(mark: str) -> Path:
    return runtime_folder("runs") / f"{mark}.json"


def _ended(mark: str) -> bool:
    found = run_mark.parse(mark)
    if found is not None and not found.local:
        with suppress(OSError):
            if time.time() - _list(mark).stat().st_mtime > _OLD_SECONDS:
                _list(mark).unlink()
    return found is not None and found.ended


def _dead_folder(path: Path) -> bool:
    name = _FOLDER.fullmatch(path.name)
    mark = run_mark.parse(name[1]) if name else None
    with suppress(OSError):
        return (
            mark is not None
            and mark.ended
            and not path.is_symlink()
            and path.is_dir()
            and path.lstat().st_uid == os.getuid()
        )
    return False


def _remove_listed(path: Path, mapped: set[tuple[str, int]]) -> list[str]:
    removed = []
    try:
        listed = [(str(name), int(inode)) for name, inode in read_json(path)["files"]]
    except (DraftsmithError, KeyError, TypeError, ValueError):
        listed = []
    for name, inode in listed:
        with suppress(OSError):
            found = os.lstat(name)
            same = found.st_ino == inode and found.st_uid == os.getuid()
            if name.startswith(SHARED) and "/" not in name[len(SHARED) :] and same and (name, inode) not in mapped:
                os.unlink(name)
                removed.append(name)
    path.unlink(missing_ok=True)
    return removed


def _own_pids() -> list[int]:
    pids = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.uids().real == os.getuid():
                pids.append(process.pid)
    return pids


def _mapped(pids: Iterable[int]) -> set[tuple[str, int]]:
    """Path and inode of each file in /dev/shm that one of the processes maps (proc(5), /proc/PID/maps)."""
    found = set()
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and fields[5].startswith(SHARED) and not fields[5].endswith(" (deleted)"):
                    found.add((fields[5], int(fields[4])))
    return found
