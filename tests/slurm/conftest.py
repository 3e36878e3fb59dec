"""The cluster of the tests in this folder."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from cluster import Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A Slurm of two nodes with eight GPUs and one without."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        pytest.skip("the Slurm cluster for tests needs root on Debian")
    with _free_ports() as first:
        # The path holds sockets, so it has to be short.
        made = Cluster(Path(f"/tmp/draftsmith-slurm-{os.getpid()}"), first)
        try:
            made.start()
            yield made
        finally:
            made.lab("stop", "--purge", check=False)


@contextmanager
def _free_ports() -> Iterator[int]:
    """The first of the ports of a cluster that nobody uses: two of its own, one for each node from 100 and from 200 on.

    Another worker of the tests may start a cluster at this moment, whose programs have not come to bind their ports yet: a
    lock on the first one is held as long as the cluster is.
    """
    for first in range(17400, 30000, 400):
        with ExitStack() as opened:
            held = opened.enter_context(socket.socket(socket.AF_UNIX))
            try:
                # A name of the kernel's own, which goes with the process.
                held.bind(f"\0draftsmith-slurm-ports-{first}")
                with ExitStack() as tried:
                    for port in (first, first + 1, first + 100, first + 101, first + 200):
                        tried.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            yield first
            return
    raise AssertionError("no free ports between 17400 and 30000")
