"""Folders that name the host and the process which made them, so that another run can tell whether their owner is gone.

A process's number means something only where it was given: on one boot of one host, and in one container. The name tells
that place too (:func:`draftsmith.processes.run_mark.here`), as containers with the host's network all have its name.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from draftsmith.log import log
from draftsmith.processes.run_mark import here

# A folder that changed before a process began is not that process's; clocks of file servers may differ by less than this.
_CLOCK_SECONDS = 600.0
# Of another place, a number tells nothing: then only what was left before this host began to run, or has not changed for so
# long (a run that works adds a file in minutes, and one that loads in an hour or two), is known to be nobody's.
_OLD_SECONDS = 48 * 3600.0


@dataclass(frozen=True)
class Owner:
    """Who made a folder; ``gone`` when that process is known to have ended, and ``note`` says it for a person."""

    host: str
    pid: int
    gone: bool
    note: str
    place: str | None = None
    """Where the number means something; None in names of an older version."""

    @property
    def mine(self) -> bool:
        """Whether it has this process's own number, of this place."""
        return (self.host, self.place, self.pid) == (socket.gethostname(), here(), os.getpid())


def folder_name(prefix: str) -> str:
    """A name for a folder of this process."""
    return f"{prefix}-{socket.gethostname()}@{here()}-{os.getpid()}"


def owner(path: Path, prefix: str) -> Owner | None:
    """The owner of the folder ``path``, whose name begins with the regular expression ``prefix``; None for any other name.

    One with this process's own number counts as another's: in a container each run may be process 7. Whoever asks leaves
    its own folder out.
    """
    name = re.fullmatch(rf"{prefix}-(?P<host>[^@]+)(?:@(?P<place>[0-9a-f]{{8}}))?-(?P<pid>\d+)", path.name)
    if name is None:
        return None
    host, place, pid = name["host"], name["place"], int(name["pid"])
    gone, note = False, f"of process {pid} on {host}, which may be alive: look from there"
    if host == socket.gethostname() and place == here():
        gone = _gone(path, pid)
        note = f"of process {pid}, which is {'gone' if gone else 'alive'}"
    elif host == socket.gethostname():
        # A name without a place may be of this one.
        gone = _left(path) and (place is not None or _gone(path, pid))
        where = "of an older version" if place is None else "of another container or an earlier boot of this host"
        fate = "is gone, as it was left long ago" if gone else "may be alive: look from there"
        note = f"of process {pid} {where}, which {fate}"
    return Owner(host, pid, gone, note, place)


def _gone(path: Path, pid: int) -> bool:
    try:
        begun = psutil.Process(pid).create_time()
        return begun > path.stat().st_mtime + _CLOCK_SECONDS
    except psutil.NoSuchProcess:
        return True
    except OSError:
        # Its owner has just removed it.
        return False


def _left(path: Path) -> bool:
    """Whether nothing has changed in a folder since before this host began to run, or for very long."""
    try:
        changed = path.stat().st_mtime
    except OSError:
        return False
    return changed < max(psutil.boot_time() - _CLOCK_SECONDS, time.time() - _OLD_SECONDS)


def sweep(root: Path, prefix: str, own: bool = False) -> list[Owner]:
    """Remove the folders in ``root`` that processes of this user and host have left; gives the owners of those that stay.

    ``own`` says that one with this process's number is none of this process's, which has made none yet.
    """
    staying = []
    for path in sorted(root.glob("*")) if root.is_dir() else []:
        found = owner(path, prefix)
        if found is None or path.is_symlink():
            continue
        if (found.gone or (own and found.mine)) and _ours(path):
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
