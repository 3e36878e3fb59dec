"""An engine that works on when the whole job is asked to end.

A scheduler sends SIGTERM to all processes of a job, and each of vLLM's would take it for an order to drop what it computes,
though the driver has heard it too and only begins nothing more. So the driver holds its engine: as long as it lives and
the file that it names is there, the engine's processes pass over SIGTERM. The driver removes the file before it ends the
engine itself. Where the driver is gone, the file cannot be made or a process has not come so far, SIGTERM is vLLM's.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from draftsmith.processes import Identity, this

HELD = "DRAFTSMITH_HELD"
"""The driver's number and start time and the file, for the processes of its engine."""


def hold(folder: Path) -> None:
    """Hold the engine that this process is about to start, by a file in ``folder``, which is this process's own."""
    me, file = this(), folder.absolute() / "at-work"
    with suppress(OSError):
        file.touch()
    os.environ[HELD] = f"{me.pid}-{me.start}-{file}"
    _hook()


@cache
def _hook() -> None:
    # A core that was forked has vLLM's plugins already and asks for none; its next step is to fork the workers.
    os.register_at_fork(before=pass_over)


def release() -> None:
    """Let SIGTERM through to the engine; call it right before the engine is ended. A second call does nothing."""
    driver, file = _held()
    if driver == this() and file is not None:
        with suppress(OSError):
            file.unlink(missing_ok=True)
        del os.environ[HELD]


def pass_over() -> None:
    """In a process of a held engine, once vLLM has set its own handler: put one before it. It may be called often."""
    driver, file = _held()
    if driver is None or file is None or driver.pid == os.getpid():
        return
    # No other thread may set one.
    if threading.current_thread() is not threading.main_thread():
        return
    previous = signal.getsignal(signal.SIGTERM)
    # None is a handler that Python knows nothing of.
    if previous is not None and not isinstance(previous, _Held):
        signal.signal(signal.SIGTERM, _Held(driver, file, previous))


class _Held:
    """A handler that calls the one before it only when the engine is no longer held."""

    def __init__(self, driver: Identity, file: Path, previous: Any) -> None:
        self._driver, self._file, self._previous = driver, file, previous

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._driver.alive and os.path.exists(self._file):
            return
        if callable(self._previous):
            self._previous(number, frame)
        elif self._previous == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def _held() -> tuple[Identity | None, Path | None]:
    pid, _, rest = os.environ.get(HELD, "").partition("-")
    start, _, file = rest.partition("-")
    if pid.isdigit() and start.isdigit() and file:
        return Identity(int(pid), int(start)), Path(file)
    return None, None
