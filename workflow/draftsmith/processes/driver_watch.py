"""An engine whose driver is gone ends by itself.

vLLM's workers notice when its core dies, but the core does not notice when the process that drives it is killed, and keeps
the GPUs. So a thread in the core and in each worker waits for the driver's end; in the core it is started by vLLM's own way for
plugins, before there are workers. The kernel's own PR_SET_PDEATHSIG would not do: it tells of
a parent's death, but between a worker and the driver stands the core, which is not this project's to change.
"""

from __future__ import annotations

import os
import select
import signal
import threading

import psutil

from draftsmith.processes import Identity, held_engine, identity, send, this, wait

DRIVER = "DRAFTSMITH_DRIVER"
"""The driver's number and start time, for the processes of its engine."""
GRACE_SECONDS = 15.0
"""From SIGTERM, which an engine that runs takes for an orderly end, to SIGKILL, which one that still loads needs."""
_LOOK_SECONDS = 1.0
_follows: set[int] = set()
"""This process's number, once it follows a driver; a fork has the number of another."""


def announce() -> None:
    """Name this process as the driver of the engine that it is about to start."""
    me = this()
    os.environ[DRIVER] = f"{me.pid}-{me.start}"


def follow_driver() -> None:
    """In a process of the engine: end the engine when the announced driver has ended, and not before. It may be called often."""
    held_engine.pass_over()
    pid, _, start = os.environ.get(DRIVER, "").partition("-")
    if pid.isdigit() and start.isdigit() and int(pid) != os.getpid() and os.getpid() not in _follows:
        _follows.add(os.getpid())
        driver = Identity(int(pid), int(start))
        _Follower(driver, _below(driver), GRACE_SECONDS).start()


def follow_parent(grace: float = GRACE_SECONDS) -> None:
    """In a helper of a stage: come to an end, by SIGTERM and ``grace`` seconds later by SIGKILL, when its parent has ended."""
    parent = identity(os.getppid())
    if parent is not None:
        follow(parent, grace)


def follow(leader: Identity, grace: float = GRACE_SECONDS) -> None:
    """The same when ``leader`` has ended, for a helper that another process has started in its name."""
    _Follower(leader, this(), grace).start()


def _below(driver: Identity) -> Identity:
    """The engine's first process: the ancestor of this one that the driver has started, or this one itself."""
    top = psutil.Process()
    for parent in top.parents():
        if parent.pid == driver.pid:
            found = identity(top.pid)
            return found or this()
        top = parent
    return this()


class _Follower(threading.Thread):
    """Waits for the end of ``leader``, then ends ``top`` and this process."""

    def __init__(self, leader: Identity, top: Identity, grace: float) -> None:
        super().__init__(name="draftsmith-follower", daemon=True)
        self._leader, self._top, self._grace = leader, top, grace

    def run(self) -> None:
        """Cost: one thread that sleeps in the kernel."""
        _await_end(self._leader)
        send(self._top, signal.SIGTERM)
        if wait([self._top], self._grace):
            send(self._top, signal.SIGKILL)
        # With its core gone, a worker ends in good order too, unless it hangs.
        wait([this()], 5.0)
        send(this(), signal.SIGKILL)


def _await_end(process: Identity) -> None:
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):
        while wait([process], _LOOK_SECONDS):
            pass
        return
    try:
        if process.alive:
            # Readable when the process has ended (pidfd_open(2)).
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            poller.poll()
    finally:
        os.close(descriptor)
