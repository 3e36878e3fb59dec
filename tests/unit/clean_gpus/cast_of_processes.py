"""Real processes in the roles that a cleaning meets."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil

SLEEP = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP
# A run's first process: it starts another and tells its number once that is up, then ends or waits.
LEADER = """
import subprocess, sys, time
from draftsmith.processes import run_mark
run_mark.mark_run()
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(float(sys.argv[2]))
"""
# No mark of the tests' own run, and no module of the project in a process that only sleeps.
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("DRAFTSMITH_", "SLURM_", "CUDA_"))}


class Cast:
    """Starts processes and ends what it has started."""

    def __init__(self) -> None:
        self.pids: list[int] = []

    def orphan(self, code: str = SLEEP, **environment: str) -> int:
        """A process whose run is gone: it carries the run's mark, and its parent has ended."""
        return self._child(code, 0.0, environment)[0]

    def alive(self, code: str = SLEEP, **environment: str) -> tuple[int, int]:
        """A process of a run that lives, and the run's first process; neither descends from this one."""
        return self._child(code, 600.0, environment)

    def stranger(self, **environment: str) -> int:
        """A process of this user without any mark, and without a parent that is this process."""
        program = f"{sys.executable} -c '{SLEEP.replace(chr(39), chr(34))}' > /dev/null 2>&1 & echo $!"
        started = subprocess.run(["sh", "-c", program], env=CLEAN | environment, capture_output=True, text=True)
        return self._keep(int(started.stdout))

    def child(self, code: str) -> subprocess.Popen[bytes]:
        """A child of this process, as an engine is of its driver."""
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        self._keep(process.pid)
        return process

    def _child(self, code: str, seconds: float, environment: dict[str, str]) -> tuple[int, int]:
        # By way of a shell that ends, so that the leader is not this process's child.
        program = '"$0" -c "$1" "$2" "$3" & echo $!'
        shell = subprocess.Popen(
            ["sh", "-c", program, sys.executable, LEADER, code, str(seconds)],
            stdout=subprocess.PIPE, text=True, env=CLEAN | environment,
        )  # fmt: skip
        assert shell.stdout is not None
        leader = self._keep(int(shell.stdout.readline()))
        child = self._keep(int(shell.stdout.readline()))
        shell.wait()
        if not seconds:
            deadline = time.monotonic() + 10
            while not gone(leader) and time.monotonic() < deadline:
                time.sleep(0.01)
        return child, leader

    def _keep(self, pid: int) -> int:
        self.pids.append(pid)
        return pid

    def end(self) -> None:
        """SIGKILL to everything that was started; the numbers are too young to have been given away."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def gone(pid: int) -> bool:
    """Whether a process has ended; nobody may have collected it yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
