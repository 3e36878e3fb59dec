"""One process a GPU.

A stage is one command. Where several GPUs were granted, that command starts one process for each, as torchrun would, and
stays behind to pass on SIGTERM and to end the others when one fails. Under torchrun (RANK is set) nothing is started.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from draftsmith.errors import DraftsmithError
from draftsmith.log import log
from draftsmith.processes import driver_watch
from draftsmith.signals import EXIT_TERMINATED, Termination

# A checkpoint may take this long, in seconds, after SIGTERM.
_GRACE = 600


def rank() -> int:
    """This process's number among those that train together."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """How many processes train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_world_size() -> int:
    """How many of them share this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or world_size())


def run_on_all(count: int, work: Callable[..., None], arguments: dict[str, Any]) -> None:
    """Call ``work(**arguments)`` in ``count`` new processes that find each other through torch.distributed's variables.

    Returns when all have ended well. Raises SystemExit with 143 after SIGTERM, and :class:`DraftsmithError` when a process
    failed; that process has told its own error by then.
    """
    context = multiprocessing.get_context("spawn")
    environment = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    processes = [
        context.Process(
            target=_rank,
            args=(work, arguments, environment | {"RANK": str(number), "LOCAL_RANK": str(number)}),
            name=f"rank {number}",
        )
        for number in range(count)
    ]
    with Termination() as termination:
        for process in processes:
            process.start()
        told = 0.0
        while any(process.is_alive() for process in processes):
            time.sleep(0.2)
            failed = [process for process in processes if process.exitcode not in (None, 0)]
            if (termination.asked or failed) and not told:
                told = time.monotonic()
                for process in processes:
                    if process.is_alive():
                        process.terminate()
            # A process whose neighbour has died waits for it in a collective operation and cannot come to an orderly end.
            if told and time.monotonic() - told > (_GRACE if termination.asked else 10):
                for process in processes:
                    if process.is_alive():
                        process.kill()
        codes = {process.name: process.exitcode for process in processes}
    if termination.asked:
        raise SystemExit(EXIT_TERMINATED)
    if any(codes.values()):
        raise DraftsmithError(
            f"training failed; exit codes: {codes}. The message of the process that failed first is above"
        )


def _rank(work: Callable[..., None], arguments: dict[str, Any], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    driver_watch.follow_parent(_GRACE)
    try:
        work(**arguments)
    except DraftsmithError as error:
        log(f"rank {environment['RANK']}: {error}")
        sys.exit(1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
