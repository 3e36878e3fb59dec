"""Signals reach the process that was meant, and all that descends from it."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from cast_of_processes import STUBBORN, Cast, gone

from draftsmith import processes
from draftsmith.clean_gpus import ending, holders
from draftsmith.errors import DraftsmithError

# A process that notes SIGTERM, and ends one that ignores it as vLLM's core does its workers; or leaves it be.
PARENT = """
import signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {stubborn!r}], stdout=subprocess.PIPE)
child.stdout.readline()
open({note!r}, "w").write(str(child.pid))
def leave(*_):
    if {tidy}:
        child.kill()
        child.wait()
    sys.exit()
signal.signal(signal.SIGTERM, leave)
print("up", flush=True)
time.sleep(600)
"""


def test_a_number_that_was_given_away_again_is_not_hit(nvml: object, cast: Cast) -> None:
    """The process has another start time than the one that was found on the GPU."""
    pid = cast.orphan()
    found = holders.describe("0", pid, 0)
    ending.end([dataclasses.replace(found, start=found.start - 1)])
    assert not gone(pid)


def test_one_that_takes_the_number_before_sigkill_is_not_hit(
    nvml: object, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ignores SIGTERM; then, as /proc has it, another process with its number is there."""
    monkeypatch.setattr(ending, "TERM_SECONDS", 0.3)
    pid = cast.orphan(STUBBORN)
    found = holders.describe("0", pid, 0)
    stat, begun = processes._stat, time.monotonic()

    def reused(asked: int) -> tuple[str, int] | None:
        now = stat(asked)
        return now and ((now[0], now[1] + 1) if asked == pid and time.monotonic() - begun > 0.2 else now)

    monkeypatch.setattr(processes, "_stat", reused)
    ending.end([found])
    assert not gone(pid)


@pytest.mark.parametrize("pidfd", [True, False])
def test_a_signal_goes_to_the_process_that_was_meant(cast: Cast, monkeypatch: pytest.MonkeyPatch, pidfd: bool) -> None:
    """By its descriptor, and on kernels without any by its number."""
    if not pidfd:
        monkeypatch.delattr(os, "pidfd_open")
    pid = cast.orphan()
    found = processes.identity(pid)
    assert found is not None
    assert not processes.send(dataclasses.replace(found, start=found.start + 1), signal.SIGKILL)
    assert not gone(pid)
    assert processes.send(found, signal.SIGKILL)
    assert processes.wait([found], 10) == []
    assert not processes.send(found, signal.SIGKILL), "it is gone"


@pytest.mark.parametrize("tidy", [True, False])
def test_what_it_has_started_ends_with_it(
    nvml: object, cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tidy: bool
) -> None:
    """SIGTERM to the first alone, so that it can end its children itself; what it leaves is killed."""
    monkeypatch.setattr(ending, "TERM_SECONDS", 5.0 if tidy else 0.5)
    note = tmp_path / "child"
    first = cast.orphan(PARENT.format(stubborn=STUBBORN, note=str(note), tidy=tidy))
    child = int(note.read_text())
    cast.pids.append(child)
    assert psutil.Process(child).ppid() == first
    # Only the child is on a GPU, yet both are orphans of one run.
    found = [holders.describe("0", child, 0), holders.describe("", first, 0)]
    assert [holder.owner for holder in found] == ["orphan", "orphan"]
    begun = time.monotonic()
    ending.end(found)
    assert gone(first)
    assert gone(child)
    assert not tidy or time.monotonic() - begun < 4, "nobody had to be waited for"


def test_one_that_does_not_end_at_all(nvml: object, cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process does that hangs in the driver."""
    monkeypatch.setattr(ending, "TERM_SECONDS", 0.1)
    monkeypatch.setattr(ending, "KILL_SECONDS", 0.1)
    monkeypatch.setattr(ending, "send", lambda process, number: True)
    pid = cast.orphan()
    with pytest.raises(DraftsmithError, match=rf"SIGKILL does not end GPU 0: process {pid} .*; it hangs in the driver"):
        ending.end([holders.describe("0", pid, 0)])


def test_pythons_tracker_of_shared_memory_is_left_to_tidy_up(nvml: object, cast: Cast) -> None:
    """It removes what the others have left when they have ended, and then ends; killed with them, it would remove nothing."""
    tracker = cast.orphan("import time\n# multiprocessing.resource_tracker\nprint('up', flush=True)\ntime.sleep(60)\n")
    other = cast.orphan()
    ending.end([holders.describe("", pid, 0) for pid in (tracker, other)])
    assert gone(other)
    assert not gone(tracker)
