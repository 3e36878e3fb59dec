"""Folders that a run makes for itself and takes away again."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from draftsmith.log import log

_NAME = re.compile(r"\d+-of-\d+-(.+)-(\d+)")


@contextlib.contextmanager
def staging(folder: Path, scatteritem: str) -> Iterator[Path]:
    """A folder beside the batch files, so that publishing is a rename; what killed runs of this host left is removed."""
    root = folder / ".staging"
    for old in root.glob("*"):
        name = _NAME.fullmatch(old.name)
        # Another host's may be alive; one with this process's own number is that of a process before it, in a container.
        dead = name and (int(name[2]) == os.getpid() or not psutil.pid_exists(int(name[2])))
        if name and name[1] == socket.gethostname() and dead:
            log(f"removing {old}, left by process {name[2]} that is gone")
            shutil.rmtree(old, ignore_errors=True)
        elif name:
            log(
                f"extract: {old} belongs to process {name[2]} on {name[1]}, which may be at work on this store: "
                "rows that both lack are computed twice, and none is harmed"
            )
    path = root / f"{scatteritem}-{socket.gethostname()}-{os.getpid()}"
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A short path, for sockets that vLLM leaves behind."""
    path = Path(tempfile.mkdtemp(prefix="ds-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
