"""The folder in which batch files are made before they are published."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from draftsmith.errors import DraftsmithError
from draftsmith.files import check_writable
from draftsmith.log import log
from draftsmith.processes.owned_folders import folder_name, sweep

SHARD = r"\d+-of-\d+"
_NAME = ".staging"


def unwritable(folder: Path) -> DraftsmithError | None:
    """Why no batch can be written to a fingerprint's ``folder``, which need not be there yet; None when one can.

    A store of another user, or on a read-only file system, serves a run all the same whose rows are all in it.
    """
    # What is yet to be made is made as the folder above it allows.
    there = [each for each in (folder, folder / _NAME) if os.path.lexists(each)] or [folder.parent]
    try:
        for each in there:
            check_writable(each, "extract.store")
    except DraftsmithError as error:
        return error
    return None


@contextlib.contextmanager
def staging(folder: Path, scatteritem: str) -> Iterator[Path]:
    """A folder beside the batch files, so that publishing is a rename; what killed runs of this host left is removed."""
    root = folder / _NAME
    for owner in sweep(root, SHARD, own=True):
        log(
            f"extract: {root} has a folder of process {owner.pid} on {owner.host}, which may be at work on this store: "
            "rows that both lack are computed twice, and none is harmed"
        )
    path = root / folder_name(scatteritem)
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
