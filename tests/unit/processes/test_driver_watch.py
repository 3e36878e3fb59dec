"""What a killed driver started ends by itself: real processes in the places of driver, core and workers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.metadata import distribution
from types import SimpleNamespace

import pytest

from draftsmith import processes
from draftsmith.processes import Identity, driver_watch

# As vLLM's core: it starts workers, each of which follows the driver, and knows nothing of it itself.
CORE = """
import signal, subprocess, sys, time
children = [subprocess.Popen([sys.executable, "-c", sys.argv[2]], stdout=subprocess.PIPE) for _ in range(2)]
for child in children:
    child.stdout.readline()
if sys.argv[1] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(*(child.pid for child in children), flush=True)
time.sleep(600)
"""
WORKER = """
import signal, sys, time
from draftsmith.processes import driver_watch
driver_watch.GRACE_SECONDS = 0.5
signal.signal(signal.SIGTERM, signal.SIG_IGN)
driver_watch.follow_driver()
print("up", flush=True)
time.sleep(600)
"""
DRIVER = """
import subprocess, sys, time
from draftsmith.processes import driver_watch
driver_watch.announce()
core = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], stdout=subprocess.PIPE, text=True)
print(core.pid, core.stdout.readline(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def ended() -> Iterator[list[int]]:
    """Numbers of processes that are ended after the test, should they still be there."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def known(pids: list[int]) -> list[Identity]:
    return [found for pid in pids if (found := processes.identity(pid)) is not None]


@pytest.mark.parametrize("core", ["obedient", "stubborn"])
def test_core_and_workers_end_with_the_driver(ended: list[int], core: str) -> None:
    """SIGTERM to the core, and SIGKILL where that does not help; the workers here ignore SIGTERM as well."""
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, CORE, core, WORKER], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    ended += [int(pid) for pid in driver.stdout.readline().split()]
    engine = known(ended)
    assert len(engine) == 3
    assert len(processes.wait(engine, 0.5)) == 3, "while the driver lives they do"
    driver.kill()
    driver.wait()
    assert processes.wait(engine, 20) == []


def test_helpers_of_a_stage_end_with_it(ended: list[int]) -> None:
    """Ranks of a training, a serving that is measured."""
    helper = "import time; from draftsmith.processes import driver_watch; driver_watch.follow_parent(); print('up', flush=True); time.sleep(600)"
    stage = f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {helper!r}]); print(child.pid, flush=True); child.wait()"
    with subprocess.Popen([sys.executable, "-c", stage], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = {process.stdout.readline().strip(), process.stdout.readline().strip()}
        ended.append(int((lines - {"up"}).pop()))
        (child,) = known(ended)
        process.kill()
    assert processes.wait([child], 10) == []


@pytest.mark.parametrize("pidfd", [True, False])
def test_the_end_of_a_process_is_noticed(monkeypatch: pytest.MonkeyPatch, pidfd: bool) -> None:
    """At once by the kernel, or by looking every so often."""
    monkeypatch.setattr(driver_watch, "_LOOK_SECONDS", 0.1)
    if not pidfd:
        monkeypatch.delattr(os, "pidfd_open")
    with subprocess.Popen(["sleep", "600"]) as process:
        (leader,) = known([process.pid])
        waiting = threading.Thread(target=driver_watch._await_end, args=(leader,), daemon=True)
        waiting.start()
        time.sleep(0.3)
        assert waiting.is_alive()
        process.kill()
        process.wait()
        waiting.join(5)
        assert not waiting.is_alive()
        # Of another process with its number, or of one that is gone already, nothing is awaited.
        driver_watch._await_end(leader)
    driver_watch._await_end(Identity(os.getpid(), 1))


def test_a_driver_does_not_follow_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine within the driver's process, as on a CPU; and one that nobody has announced a driver to."""
    started: list[object] = []
    monkeypatch.setattr(driver_watch._Follower, "start", lambda self: started.append(self))
    monkeypatch.setenv(driver_watch.DRIVER, "")
    driver_watch.follow_driver()
    driver_watch.announce()
    driver_watch.follow_driver()
    assert started == []
    parent = processes.identity(os.getppid())
    assert parent is not None
    monkeypatch.setenv(driver_watch.DRIVER, f"{parent.pid}-{parent.start}")
    driver_watch.follow_driver()
    assert len(started) == 1


def test_vllm_is_told_of_it_and_twice_is_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a plugin it is called in vLLM's core and workers, and a worker calls it by itself as well."""
    named = {
        entry.name: entry for entry in distribution("draftsmith").entry_points.select(group="vllm.general_plugins")
    }
    assert named["draftsmith"].load() is driver_watch.follow_driver
    started: list[object] = []
    monkeypatch.setattr(driver_watch, "_Follower", lambda *given: SimpleNamespace(start=lambda: started.append(given)))
    monkeypatch.setattr(driver_watch, "_follows", set())
    driver_watch.follow_driver()
    assert not started, "nobody has announced a driver"
    monkeypatch.setenv(driver_watch.DRIVER, f"{os.getppid()}-1")
    driver_watch.follow_driver()
    driver_watch.follow_driver()
    assert len(started) == 1
