"""SIGTERM to a whole job leaves a held engine at work: real processes in the places of driver, core and worker."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftsmith import processes
from draftsmith.processes import Identity, held_engine

# Forked as vLLM does it by default: the core sets its handler, then forks the worker, which sets its own.
JOB = """
import os, signal, sys, time
from pathlib import Path
from draftsmith.processes import driver_watch, held_engine
driver_watch.announce()
held_engine.hold(Path(sys.argv[1]))
signal.signal(signal.SIGTERM, lambda *_: None)
def vllm(number, frame):
    os._exit(7)
if not os.fork():
    signal.signal(signal.SIGTERM, vllm)
    if not os.fork():
        signal.signal(signal.SIGTERM, vllm)
        driver_watch.follow_driver()
        os.write(1, f"{os.getpid()} {os.getppid()}\\n".encode())
    while True:
        time.sleep(600)
sys.stdin.readline()
held_engine.release()
os.write(1, b"released\\n")
time.sleep(600)
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[Identity]]]:
    """The driver, and its engine's worker and core."""
    driver = subprocess.Popen(
        [sys.executable, "-c", JOB, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert driver.stdout is not None
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    yield driver, [found for pid in pids if (found := processes.identity(pid)) is not None]
    for pid in [driver.pid, *pids]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    driver.communicate()


def asked(engine: list[Identity]) -> list[Identity]:
    """SIGTERM to all; those that are there half a second later."""
    for process in engine:
        processes.send(process, signal.SIGTERM)
    return processes.wait(engine, 0.5)


def test_a_held_engine_works_on_until_its_driver_lets_go(job: tuple[subprocess.Popen[str], list[Identity]]) -> None:
    driver, engine = job
    assert len(engine) == 2
    processes.send(Identity(driver.pid, processes.identity(driver.pid).start), signal.SIGTERM)  # type: ignore[union-attr]
    assert asked(engine) == engine
    assert asked(engine) == engine, "however often"
    assert driver.stdin is not None
    assert driver.stdout is not None
    driver.stdin.write("\n")
    assert driver.stdout.readline() == "released\n"
    assert asked(engine) == []


def test_the_engine_of_a_driver_that_is_gone_is_not_held(job: tuple[subprocess.Popen[str], list[Identity]]) -> None:
    driver, engine = job
    driver.kill()
    time.sleep(0.1)
    assert asked(engine) == []


def test_a_driver_without_a_folder_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, say: SIGTERM is then vLLM's, as ever."""
    reached: list[int] = []
    parent = processes.identity(os.getppid())
    assert parent is not None
    monkeypatch.setenv(held_engine.HELD, f"{parent.pid}-{parent.start}-{tmp_path}/none-such/at-work")
    before = signal.signal(signal.SIGTERM, lambda number, _: reached.append(number))
    try:
        held_engine.pass_over()
        held_engine.pass_over()
        signal.raise_signal(signal.SIGTERM)
        assert reached == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
