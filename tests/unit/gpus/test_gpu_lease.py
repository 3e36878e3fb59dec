"""Jobs side by side on one machine get GPUs of their own: real processes, stand-in GPUs, real locks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from draftsmith import hardware
from draftsmith.errors import DraftsmithError
from draftsmith.gpus import gpu_lease
from draftsmith.processes import run_mark, runtime_folder
from fake_nvml import GIB, Nvml, h200s

# A job: it takes its GPUs as a stage does, tells them, and works until it is told to leave.
JOB = """
import os, sys, time
import fake_nvml
from draftsmith import hardware
from draftsmith.gpus import gpu_lease
from draftsmith.errors import DraftsmithError
gpus, count, minutes, then = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
fake_nvml.install(fake_nvml.Nvml(fake_nvml.h200s(gpus)))
try:
    gpu_lease.take(count, minutes, 1024)
except DraftsmithError as error:
    print("failed:", error, flush=True)
    sys.exit(1)
print(os.environ.get("CUDA_VISIBLE_DEVICES"), *(gpu.index for gpu in hardware.gpus()), flush=True)
exec(then)
sys.stdin.readline()
"""
FORK = "pid = os.fork(); pid or time.sleep(600); print(pid, flush=True)"
OWN = ("DRAFTSMITH_", "SLURM_", "CUDA_", "RANK")


class Jobs:
    """Starts jobs on a machine of ``gpus`` GPUs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.gpus = folder, 4
        self.running: list[subprocess.Popen[str]] = []

    def start(self, count: int, minutes: float = 0.0, then: str = "", **environment: str) -> subprocess.Popen[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(OWN)}
        clean |= {"PYTHONPATH": os.pathsep.join(sys.path), runtime_folder.VARIABLE: str(self.folder)}
        process = subprocess.Popen(
            [sys.executable, "-c", JOB, str(self.gpus), str(count), str(minutes), then],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean | environment,
        )  # fmt: skip
        self.running.append(process)
        return process

    def got(self, count: int, **more: str) -> list[str]:
        """Start a job and give what CUDA_VISIBLE_DEVICES is in it, then the GPUs that it sees."""
        return said(self.start(count, **more)).split()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    made = Jobs(tmp_path / "runtime")
    yield made
    for process in made.running:
        process.kill()
        process.communicate()


def test_two_jobs_side_by_side_share_no_gpu_and_a_third_is_refused(jobs: Jobs) -> None:
    assert jobs.got(2) == ["0,1", "0", "1"]
    assert jobs.got(2) == ["2,3", "2", "3"]
    first, second = jobs.running
    told = said(jobs.start(1))
    assert told.startswith(
        "failed: 0 of the 1 GPUs that this job needs are free after 0 min; taken are GPU 0 by process "
    )
    assert f"GPU 0 by process {first.pid} (-c 4 2 0.0" in told
    assert f"GPU 3 by process {second.pid} (" in told
    assert told.endswith("wait for those jobs, end them, or raise clean.wait_minutes")


def test_a_job_that_waits_goes_on_when_another_is_killed(jobs: Jobs) -> None:
    """kill -9: nothing of the job's own can give its GPUs back; the kernel does."""
    jobs.got(3)
    waiting = jobs.start(2, minutes=5.0)
    assert waiting.stderr is not None
    assert f"waiting for 2 GPU(s); taken are GPU 0 by process {jobs.running[0].pid}" in waiting.stderr.readline()
    # While it waits it keeps nothing: the GPU that is left goes to a job that needs no more.
    assert jobs.got(1)[0] == "3"
    assert waiting.poll() is None
    jobs.running[0].send_signal(signal.SIGKILL)
    assert said(waiting).split()[0] == "0,1"


def test_an_engine_that_outlives_its_killed_driver_does_not_keep_the_lease(jobs: Jobs) -> None:
    """What it does keep, memory, is found by the cleaning; vLLM forks its processes, and a lock would be shared."""
    job = jobs.start(4, then=FORK)
    said(job)
    child = int(said(job))
    try:
        job.send_signal(signal.SIGKILL)
        job.wait()
        os.kill(child, 0)
        assert jobs.got(4)[0] == "0,1,2,3"
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_job_that_ends_gives_its_gpus_back(jobs: Jobs) -> None:
    jobs.got(4)
    jobs.running[0].communicate("leave\n")
    assert jobs.got(4)[0] == "0,1,2,3"


def test_a_part_of_what_is_visible(jobs: Jobs) -> None:
    """In the words of whoever made it visible, but numbered as the hardware is: a UUID here and a number there are one GPU."""
    second, third = (gpu.uuid for gpu in h200s(4)[2:])
    assert jobs.got(1, CUDA_VISIBLE_DEVICES=f"{third},{second}") == ["3", "3"]
    assert jobs.got(1, CUDA_VISIBLE_DEVICES="3,2") == ["2", "2"]


@pytest.mark.parametrize("count", [1, 2])
def test_slurm_numbers_gpus_itself(jobs: Jobs, count: int) -> None:
    """Where a job sees no more than it was given nothing is taken; several jobs within one allocation share as elsewhere."""
    alone = {"SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": "1,2"}
    found = [jobs.got(count, **alone)[0] for _ in range(2)]
    assert found == (["1,2", "1,2"] if count == 2 else ["1", "2"])


def test_ranks_of_torchrun_take_no_lease(jobs: Jobs) -> None:
    """They all index into the same visible GPUs; who starts torchrun by hand numbers them by hand."""
    found = [jobs.got(1, RANK=str(rank), LOCAL_RANK=str(rank), CUDA_VISIBLE_DEVICES="2,3") for rank in range(2)]
    assert found == [["2,3", "2", "3"]] * 2


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[int], Nvml]]:
    """This process on a machine of so many GPUs, with no lease and no mark; what it takes it gives back."""
    for name in (*(name for name in os.environ if name.startswith(OWN)), "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name in (run_mark.LEASED, run_mark.MARK):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv(runtime_folder.VARIABLE, str(tmp_path / "runtime"))

    def machine(count: int) -> Nvml:
        fake = Nvml(h200s(count))
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        hardware.gpus.cache_clear()
        return fake

    yield machine
    gpu_lease._let_go()
    hardware.gpus.cache_clear()


def test_the_stage_that_a_stage_starts_keeps_its_gpus(here: Callable[[int], Nvml]) -> None:
    """As dry_run starts extract_shard, and training its ranks: the lease is the run's."""
    here(4)
    gpu_lease.take(2, 0, 1024)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    gpu_lease.take(2, 0, 1024)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    # Another run's lease counts for nothing.
    os.environ[run_mark.LEASED] = "1-1-01234567"
    with pytest.raises(DraftsmithError, match=r"0 of the 2 GPUs that this job needs are free"):
        gpu_lease.take(2, 0, 1024)


def test_gpus_with_memory_in_use_come_last(here: Callable[[int], Nvml]) -> None:
    """What an orphan holds is left to a job that cannot do without it, which will find the orphan."""
    here(3).gpus[0].base = 2 * GIB
    gpu_lease.take(2, 0, 1024)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,2"


def test_a_lock_whose_name_was_removed_is_taken_anew(here: Callable[[int], Nvml], tmp_path: Path) -> None:
    """By a cleaner of /tmp, say: a job that holds the old file would not be met by one that makes a new one."""
    path = tmp_path / "x.lock"
    stat, removed = os.stat, []

    def racing(name: object, **more: object) -> os.stat_result:
        if name == path and not removed:
            removed.append(path.unlink())
        return stat(name, **more)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_lease.os, "stat", racing)
        descriptor = gpu_lease._lock(path)
    assert descriptor is not None
    assert os.fstat(descriptor).st_ino == path.stat().st_ino
    assert gpu_lease._lock(path) is None
    os.close(descriptor)


@pytest.mark.parametrize("how", ["a link", "open to others", "another user's", "a file"])
def test_a_folder_that_somebody_else_could_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    folder = tmp_path / "runtime"
    monkeypatch.setenv(runtime_folder.VARIABLE, str(folder))
    if how == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    elif how == "a file":
        folder.touch()
    else:
        folder.mkdir(mode=0o700)
        if how == "open to others":
            folder.chmod(0o777)
        elif os.geteuid() != 0:
            pytest.skip("needs root to give a folder away")
        else:
            os.chown(folder, 65534, 65534)
    with pytest.raises(DraftsmithError, match=rf"{folder}: .*name another folder in {runtime_folder.VARIABLE}"):
        runtime_folder.runtime_folder("gpus")
