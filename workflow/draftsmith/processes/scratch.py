"""Folders for the sockets of an engine, which vLLM never removes."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from draftsmith.processes import run_mark

PREFIX = "ds-"
# A socket's path has at most 107 characters (unix(7)), and vLLM adds a UUID of 36.
_LONGEST = 107 - 36 - 4


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder with a short path, named by the run's mark, so that another run can tell when its owner is gone."""
    prefix = f"{PREFIX}{run_mark.mark_run()}-"
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=_root(len(prefix) + 8)))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _root(name: int) -> str:
    root = tempfile.gettempdir()
    return root if len(root) + 1 + name <= _LONGEST else "/tmp"


def roots() -> list[Path]:
    """Where such folders may lie."""
    return [Path(root) for root in dict.fromkeys([tempfile.gettempdir(), "/tmp"])]
