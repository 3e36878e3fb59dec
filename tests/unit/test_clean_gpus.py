"""Who may be ended, and who is only named; with real processes and a stand-in for NVML."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from draftsmith import clean_gpus, hardware
from draftsmith.clean_gpus import MARK, Holder
from draftsmith.config import Config, parse
from draftsmith.errors import DraftsmithError


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A GPU whose compute processes are the pids put into the list; it is free once they are gone."""
    pids: list[int] = []

    def gpus() -> tuple[hardware.Gpu, ...]:
        used = sum(2 << 30 for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie")
        return (hardware.Gpu("0", "H200", 141 << 30, used),)

    gpus.cache_clear = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setattr(hardware, "gpus", gpus)
    monkeypatch.setattr(clean_gpus, "holders", lambda: [clean_gpus.describe("0", pid, 2 << 30) for pid in pids])
    monkeypatch.delenv(MARK, raising=False)
    return pids


@pytest.fixture
def orphan() -> Iterator[int]:
    """A process that a run started which is gone: it carries the run's mark, and its parent has ended."""
    code = (
        "import os, subprocess, sys, time; os.environ['DRAFTSMITH_RUN'] = f'{os.getpid()}-{int(time.time())}';"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)"
    )
    pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    yield pid
    if psutil.pid_exists(pid):
        os.kill(pid, signal.SIGKILL)


def config(**clean: object) -> Config:
    return parse({"clean": clean}, "test")


def test_an_orphan_is_named_and_left_alone_by_default(gpu: list[int], orphan: int) -> None:
    gpu.append(orphan)
    with pytest.raises(DraftsmithError, match=rf"process {orphan} .*an orphan of this workflow.*|clean\.kill_orphans"):
        clean_gpus.check(config())
    assert psutil.pid_exists(orphan)


def test_an_orphan_is_ended_when_the_config_says_so(gpu: list[int], orphan: int) -> None:
    gpu.append(orphan)
    assert [holder.pid for holder in clean_gpus.check(config(kill_orphans=True))] == [orphan]
    assert not psutil.pid_exists(orphan) or psutil.Process(orphan).status() == "zombie"


def test_a_process_of_a_run_that_lives_is_never_ended(gpu: list[int]) -> None:
    """Its leader, named in the mark, is alive."""
    code = (
        "import os, subprocess, sys, time; os.environ['DRAFTSMITH_RUN'] = f'{os.getpid()}-{int(time.time())}';"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid, flush=True); time.sleep(600)"
    )
    # Not our own child, but a stranger's to this process: started by an intermediate shell that ends.
    shell = subprocess.run(
        [
            "sh",
            "-c",
            f'{sys.executable} -c "$0" > "$1" 2> /dev/null & echo $!',
            code,
            f"/tmp/draftsmith-test-{os.getpid()}",
        ],
        capture_output=True,
        text=True,
    )
    leader = int(shell.stdout)
    path = f"/tmp/draftsmith-test-{os.getpid()}"
    try:
        deadline = time.monotonic() + 20
        while not Path(path).read_text().strip():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        child = int(Path(path).read_text())
        gpu.append(child)
        with pytest.raises(DraftsmithError, match=rf"in use.*process {child} .*your own, alive"):
            clean_gpus.check(config(kill_orphans=True))
        assert psutil.pid_exists(child)
    finally:
        for process in [*psutil.Process(leader).children(), psutil.Process(leader)]:
            process.kill()
        os.unlink(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to start another user's process")
def test_another_users_process_is_named_and_left_alone(gpu: list[int]) -> None:
    process = subprocess.Popen(["sleep", "600"], user=65534, env={MARK: "1-1"})
    try:
        gpu.append(process.pid)
        with pytest.raises(DraftsmithError, match=rf"process {process.pid} of nobody \(another user's"):
            clean_gpus.check(config(kill_orphans=True))
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_pid_that_was_given_away_again_is_not_ended(orphan: int) -> None:
    """The start time beside the pid is another one, so this is another process."""
    holder = Holder("0", orphan, "me", "sleep", started=1.0, used=0, owner="orphan")
    clean_gpus.end(holder)
    assert psutil.pid_exists(orphan)


def test_memory_that_nobody_holds_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def gpus() -> tuple[hardware.Gpu, ...]:
        return (hardware.Gpu("3", "H200", 141 << 30, 70 << 30),)

    gpus.cache_clear = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setattr(hardware, "gpus", gpus)
    monkeypatch.setattr(clean_gpus, "holders", list)
    monkeypatch.setattr(clean_gpus, "_FREE_SECONDS", 0.1)
    with pytest.raises(
        DraftsmithError, match=r"no process that can be seen from here .*GPU 3 71680 MiB.*clean\.max_used_mib"
    ):
        clean_gpus.check(config())


def test_without_a_gpu_there_is_nothing_to_do() -> None:
    assert clean_gpus.check(parse({"engine": {"device": "cpu"}}, "test")) == []


def test_an_orphan_without_a_gpu_is_named_and_ended_only_when_asked(
    monkeypatch: pytest.MonkeyPatch, orphan: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """The engine of a killed run on a CPU: it holds nothing that the next run needs, so the run goes on."""
    monkeypatch.setattr(hardware, "gpus", lambda: ())
    monkeypatch.delenv(MARK, raising=False)
    assert clean_gpus.check(config()) == []
    assert f"an earlier run left process {orphan} of" in capfd.readouterr().err
    assert psutil.pid_exists(orphan)
    assert orphan in [holder.pid for holder in clean_gpus.check(config(kill_orphans=True))]
    assert not psutil.pid_exists(orphan) or psutil.Process(orphan).status() == "zombie"


def test_a_process_that_overwrote_its_environment_is_known_by_the_mark_in_its_title() -> None:
    """As vLLM's processes do; the mark's leader is gone (or was never born), so it is an orphan."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    title = f"{MARK}={gone.pid}-{int(time.time())}::EngineCore"
    with subprocess.Popen(["env", "-i", "bash", "-c", f"exec -a {title} sleep 600"], start_new_session=True) as process:
        while title not in psutil.Process(process.pid).cmdline():
            time.sleep(0.01)
        # A stranger to this process in all but its parent, which is left out of account here.
        orphan = psutil.Process(process.pid)
        found = clean_gpus._owner(_Parentless(orphan))
        process.kill()
    assert found == "orphan"


class _Parentless:
    def __init__(self, process: psutil.Process) -> None:
        self._process = process

    def parents(self) -> list[psutil.Process]:
        return []

    def __getattr__(self, name: str) -> object:
        return getattr(self._process, name)
