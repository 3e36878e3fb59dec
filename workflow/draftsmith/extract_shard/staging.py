"""The folder in which batch files are made before they are published."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from draftsmith.log import log
from draftsmith.processes.owned_folders import folder_name, sweep

SHARD = r"\d+-of-\d+"


@contextlib.contextmanager
def staging(folder: Path, scatteritem: str) -> Iterator[Path]:
    """A folder beside the batch files, so that publishing is a rename; what killed runs of this host left is removed."""
    root = folder / ".staging"
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
