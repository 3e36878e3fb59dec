"""Folders that name the host and the process which made them, so that another run can tell whether their owner is gone."""

from __future__ import annotations

import os
import re
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from draftsmith.log import log

# A folder that changed before a process began is not that process's; clocks of file servers may differ by less than this.
_CLOCK_SECONDS = 600.0


@dataclass(frozen=True)
class Owner:
    """Who made a folder; ``gone`` when that process is known to have ended, and ``note`` says it for a person."""

    host: str
    pid: int
    gone: bool
    note: str


def folder_name(prefix: str) -> str:
    """A name for a folder of this process."""
    return f"{prefix}-{socket.gethostname()}-{os.getpid()}"


def owner(path: Path, prefix: str) -> Owner | None:
    """The owner of the folder ``path``, whose name begins with the regular expression ``prefix``; None for any other name.

    One with this process's own number counts as another's: in a container each run may be process 7. Whoever asks leaves
    its own folder out.
    """
    name = re.fullmatch(rf"{prefix}-(.+)-(\d+)", path.name)
    if name is None:
        return None
    host, pid = name[1], int(name[2])
    gone, note = False, f"of process {pid} on {host}, which may be alive: look from there"
    if host == socket.gethostname():
        gone = _gone(path, pid)
        note = f"of process {pid}, which is {'gone' if gone else 'alive'}"
    return Owner(host, pid, gone, note)


def _gone(path: Path, pid: int) -> bool:
    try:
        begun = psutil.Process(pid).create_time()
        return begun > path.stat().st_mtime + _CLOCK_SECONDS
    except psutil.NoSuchProcess:
        return True
    except OSError:
        # Its owner has just removed it.
        return False


def sweep(root: Path, prefix: str, own: bool = False) -> list[Owner]:
    """Remove the folders in ``root`` that processes of this user and host have left; gives the owners of those that stay.

    ``own`` says that one with this process's number is none of this process's, which has made none yet.
    """
    staying = []
    for path in sorted(root.glob("*")) if root.is_dir() else []:
        found = owner(path, prefix)
        if found is None or path.is_symlink():
            continue
        mine = own and found.host == socket.gethostname() and found.pid == os.getpid()
        if (found.gone or mine) and _ours(path):
            log(f"removing {path}, left by process {found.pid} that is gone")
            shutil.rmtree(path, ignore_errors=True)
        else:
            staying.append(found)
    return staying


def _ours(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.getuid()
    except FileNotFoundError:
        return False
