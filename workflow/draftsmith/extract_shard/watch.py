"""Watches over the engine's processes, so that a failure ends the run in seconds and by its name.

The driver waits for the first rank. When another rank fails, the first waits for it in a collective, and vLLM would give up
after five minutes; when a process is killed from outside, nobody writes a record. So a thread looks at the records and at
the processes, and ends what is left of the engine when the driver has not noticed by itself.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from draftsmith.extract_shard import ledger
from draftsmith.files import read_json
from draftsmith.log import log

_GRACE_SECONDS = 3.0


class Watch(threading.Thread):
    """From the moment the engine is loaded until :meth:`stop`."""

    def __init__(self, errors: Path, ranks: Mapping[int, int], interval: float = 0.2) -> None:
        """``errors`` is the folder of the workers' records, ``ranks`` gives each rank's process id."""
        super().__init__(name="draftsmith-watch", daemon=True)
        self.errors, self.interval = errors, interval
        me = psutil.Process()
        # An engine within this process has none of its own.
        self._workers = {rank: psutil.Process(pid) for rank, pid in ranks.items() if pid != me.pid}
        self._all = {process.pid: process for process in me.children(recursive=True)} if self._workers else {}
        self._end = threading.Event()
        self._read: set[Path] = set()
        self.gone: dict[str, Any] | None = None

    def run(self) -> None:
        """Look until something is wrong or :meth:`stop` is called."""
        while not self._end.wait(self.interval):
            dead = self._dead()
            if dead or self._failed():
                self.gone = dead
                if not self._end.wait(_GRACE_SECONDS):
                    self._end_engine()
                return

    def stop(self) -> None:
        """The engine has ended, or is about to be ended in good order."""
        self._end.set()
        if self.is_alive():
            self.join()

    def _failed(self) -> bool:
        """Whether there is a new record of a failed engine; rows that were refused leave records in the same folder."""
        new = set(self.errors.glob("*.json")) - self._read
        self._read |= new
        return bool(ledger.of_engine([read_json(path) for path in new]))

    def _dead(self) -> dict[str, Any] | None:
        for rank, process in self._workers.items():
            if not _alive(process):
                return {
                    "time": time.time(), "pid": process.pid, "type": "WorkerKilled", "rank": rank, "stage": "step", "rows": None,
                    "message": f"the worker process of rank {rank} (pid {process.pid}) is gone and left no record",
                    "traceback": f"The worker process of rank {rank} (pid {process.pid}) ended without an exception: it was killed from outside\n"
                    "(the kernel when memory runs out: see `dmesg`; the scheduler at a job's memory limit; a person) or crashed in native\n"
                    "code (then the log above has a 'Fatal Python error' with its stack).",
                }  # fmt: skip
        return None

    def _end_engine(self) -> None:
        # The workers first: vLLM's own core then tells the driver and tidies up; it is only killed when it does not.
        log("extract: the engine has failed and does not say so; ending its processes")
        workers = [process for process in self._workers.values() if _alive(process)]
        for process in workers:
            _kill(process)
        if not self._end.wait(2 * _GRACE_SECONDS):
            for process in self._all.values():
                _kill(process)


def _alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _kill(process: psutil.Process) -> None:
    # psutil compares the start time, so that a pid which has passed to another process is not hit.
    with suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGKILL)


def end_all(processes: list[psutil.Process], seconds: float) -> None:
    """Wait for ``processes`` to end, and end those that do not."""
    _, left = psutil.wait_procs(processes, timeout=seconds)
    for process in left:
        _kill(process)
    psutil.wait_procs(left, timeout=seconds)
