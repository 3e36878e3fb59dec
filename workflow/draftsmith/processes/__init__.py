"""Processes by number and start time: a number alone is given to another process once its owner is gone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Identity:
    """One process, and no other: ``start`` is its start in clock ticks after boot, which no change of the clock moves."""

    pid: int
    start: int

    @property
    def alive(self) -> bool:
        """Whether it runs; one that has ended and waits to be collected by its parent does not."""
        found = _stat(self.pid)
        return found is not None and found[1] == self.start and found[0] not in "ZX"


def identity(pid: int) -> Identity | None:
    """The process that has this number now; None where there is none."""
    found = _stat(pid)
    return None if found is None else Identity(pid, found[1])


def pid_namespace() -> str | None:
    """What numbers this process: a pid says something only to those with the same; None where /proc does not tell."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return None


def this() -> Identity:
    """The process that asks."""
    found = identity(os.getpid())
    if found is None:
        raise RuntimeError("/proc is not mounted, without which no process can be told from another")
    return found


def _stat(pid: int) -> tuple[str, int] | None:
    """State and start of a process, from /proc/PID/stat (proc(5), fields 3 and 22)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The name, in brackets, may hold anything.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def send(process: Identity, number: signal.Signals) -> bool:
    """Send a signal to ``process`` and to no other; gives whether it was there.

    The descriptor stays with the process that had the number when it was opened. Its start time is compared after that,
    so that nothing can come in between.
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    except (AttributeError, OSError):
        # Kernels before 5.3, and sandboxes without it: a moment is left between the look and the signal.
        descriptor = None
    try:
        if not process.alive:
            return False
        if descriptor is None:
            os.kill(process.pid, number)
        else:
            signal.pidfd_send_signal(descriptor, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        if descriptor is not None:
            os.close(descriptor)


def wait(processes: Iterable[Identity], seconds: float) -> list[Identity]:
    """Wait until all have ended, at most ``seconds``; gives those that still run."""
    deadline = time.monotonic() + seconds
    left = [process for process in processes if process.alive]
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = [process for process in left if process.alive]
    return left
