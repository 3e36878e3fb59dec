"""The cluster of the tests in this folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A Slurm of two nodes with eight GPUs and one without."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        pytest.skip("the Slurm cluster for tests needs root on Debian")
    # The path holds sockets, so it has to be short.
    made = Cluster(Path(f"/tmp/draftsmith-slurm-{os.getpid()}"), _free_ports())
    try:
        made.start()
        yield made
    finally:
        made.lab("stop", "--purge", check=False)


def _free_ports() -> int:
    """The first of the ports of a cluster that nobody uses: two of its own, one for each node from 100 and from 200 on."""
    for first in range(17400, 30000, 400):
        with contextlib.ExitStack() as opened:
            try:
                for port in (first, first + 1, first + 100, first + 101, first + 200):
                    opened.enter_context(socket.socket()).bind(("127.0.0.1", port))
                return first
            except OSError:
                continue
    raise AssertionError("no free ports between 17400 and 30000")
