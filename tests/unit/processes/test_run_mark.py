"""Whose a process is, by what it carries."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from draftsmith import processes
from draftsmith.processes import run_mark
from draftsmith.processes.run_mark import MARK, WORKFLOW

GONE = f"999999-1-{run_mark.here()}"
ELSEWHERE = "999999-1-01234567"


def started(*command: str, **environment: str) -> subprocess.Popen[bytes]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DRAFTSMITH_", "SLURM_"))}
    process = subprocess.Popen(command, env=clean | environment)
    # For a moment within exec(2) a process has neither arguments nor environment.
    while process.poll() is None and not Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(
        command[0].encode()
    ):
        time.sleep(0.001)
    return process


def test_a_mark_says_which_process_and_where() -> None:
    text = str(run_mark.own())
    assert (
        text == f"{os.getpid()}-{Path('/proc/self/stat').read_text().rpartition(')')[2].split()[19]}-{run_mark.here()}"
    )
    assert run_mark.parse(text) == run_mark.own()
    assert not run_mark.own().ended


@pytest.mark.parametrize("text", ["", "1-2", "1-2-3", "a-2-01234567", "1-2-0123456g", "1-2-01234567\n"])
def test_what_is_no_mark(text: str) -> None:
    assert run_mark.parse(text) is None


def test_a_stage_that_another_has_started_keeps_its_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    with started("sleep", "60") as other:
        found = processes.identity(other.pid)
        assert found is not None
        theirs = f"{found.pid}-{found.start}-{run_mark.here()}"
        monkeypatch.setenv(MARK, theirs)
        assert run_mark.mark_run() == theirs
        other.kill()
    # Its first process is gone now: this run is another.
    assert run_mark.mark_run() == str(run_mark.own()) == os.environ[MARK]


@pytest.mark.parametrize("inherited", [GONE, ELSEWHERE, "nonsense"])
def test_a_mark_of_another_run_is_not_kept(monkeypatch: pytest.MonkeyPatch, inherited: str) -> None:
    """A shell that a stage has left open, or a job that Slurm started with a login node's environment."""
    monkeypatch.setenv(MARK, inherited)
    assert run_mark.mark_run() == str(run_mark.own())


@pytest.mark.parametrize(
    ("environment", "orphaned"),
    [
        ({}, False),
        ({MARK: GONE}, True),
        ({MARK: ELSEWHERE}, False),
        ({WORKFLOW: GONE}, True),
        ({WORKFLOW: ELSEWHERE}, False),
        ({MARK: "alive"}, False),
        ({MARK: "alive", WORKFLOW: "alive"}, False),
        ({MARK: "alive", WORKFLOW: GONE}, True),
        ({MARK: GONE, WORKFLOW: "alive"}, True),
    ],
)
def test_when_a_process_is_an_orphan(environment: dict[str, str], orphaned: bool) -> None:
    """'alive' is the mark of this very process."""
    marks = {name: value.replace("alive", str(run_mark.own())) for name, value in environment.items()}
    with started("sleep", "60", **marks) as process:
        found = run_mark.read(process.pid)
        process.kill()
    assert run_mark.orphaned(found) is orphaned
    assert (found.any is not None) is bool(environment)


def test_a_process_that_overwrote_its_environment_is_known_by_the_mark_in_its_title() -> None:
    """As vLLM's processes do."""
    title = f"{MARK}={GONE}::EngineCore"
    code = f"import setproctitle, time; setproctitle.setproctitle({title!r}); print('up', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env={}) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = run_mark.read(process.pid)
        process.kill()
    assert str(found.stage) == GONE
    assert run_mark.orphaned(found)


def test_the_slurm_job_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its environment, or from the control group that Slurm puts a job into."""
    with started("sleep", "60", SLURM_JOB_ID="12") as process:
        assert run_mark.read(process.pid).slurm_job == "12"
        process.kill()
    files = {"cgroup": "0::/system.slice/slurmstepd.scope/job_34/step_0/user/task_0\n"}
    monkeypatch.setattr(run_mark, "_text", lambda pid, name: files.get(name, ""))
    assert run_mark.read(1).slurm_job == "34"
    assert run_mark.read(1).any is None


def test_a_zombie_is_not_alive() -> None:
    process = subprocess.Popen(["true"])
    deadline = time.monotonic() + 10
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    found = processes.identity(process.pid)
    assert found is not None
    assert not found.alive
    process.wait()
    assert processes.identity(process.pid) is None
