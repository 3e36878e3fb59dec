"""Which of the visible GPUs are this job's, where the scheduler counts GPUs and does not number them.

Snakemake on one machine lets two jobs of four GPUs run side by side on eight and tells neither which four are its own. Each
takes a lock on a file for every GPU that it uses (flock(2)): the kernel drops it when the job ends, however it ends. Slurm
numbers the GPUs of each job by CUDA_VISIBLE_DEVICES, so nothing is taken there, unless several jobs share an allocation.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from draftsmith import hardware
from draftsmith.errors import DraftsmithError
from draftsmith.hardware import Gpu
from draftsmith.log import log
from draftsmith.processes import run_mark
from draftsmith.processes.runtime_folder import runtime_folder

_LOOK_SECONDS, _TELL_SECONDS = 0.5, 60.0

# Open as long as this process lives: closing one gives its GPU back.
_held: list[int] = []


def take(count: int, wait_minutes: float, max_used_mib: int) -> None:
    """Take ``count`` of the visible GPUs and leave no others in CUDA_VISIBLE_DEVICES; wait for them if need be.

    GPUs with at most ``max_used_mib`` in use come first. Nothing is taken within a process that another stage's lease
    covers, under torchrun, or where Slurm shows no more GPUs than ``count``. Raises :class:`DraftsmithError`, which names
    who has the GPUs, when there are not enough after ``wait_minutes``.
    """
    visible = sorted(hardware.gpus(), key=lambda gpu: gpu.used > max_used_mib * 2**20)
    if count <= 0 or count > len(visible) or not _needed(count, len(visible)):
        return
    deadline, told = time.monotonic() + 60 * wait_minutes, -_TELL_SECONDS
    while True:
        taken, others = _try(visible, count)
        if taken:
            break
        who = "; ".join(f"GPU {index} by {holder}" for index, holder in others.items())
        if time.monotonic() > deadline:
            raise DraftsmithError(
                f"{len(visible) - len(others)} of the {count} GPUs that this job needs are free after {wait_minutes:g} min; taken are "
                f"{who}; wait for those jobs, end them, or raise clean.wait_minutes"
            )
        if time.monotonic() - told > _TELL_SECONDS:
            told = time.monotonic()
            log(f"waiting for {count} GPU(s); taken are {who}")
        time.sleep(_LOOK_SECONDS)
    # In CUDA's order, which is NVML's with the variable beside it.
    mine = [gpu for gpu in hardware.gpus() if gpu in taken]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.visible or gpu.index for gpu in mine)
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ[run_mark.LEASED] = run_mark.mark_run()
    hardware.gpus.cache_clear()
    if len(mine) < len(visible):
        log(f"this job has GPU {', '.join(gpu.index for gpu in mine)} of {len(visible)}")


def _needed(count: int, visible: int) -> bool:
    if os.environ.get(run_mark.LEASED) == run_mark.mark_run():
        return False
    if "RANK" in os.environ:
        # torchrun deals out the visible GPUs by itself; who starts it by hand numbers them by hand.
        return False
    return "SLURM_JOB_ID" not in os.environ or visible > count


def _try(visible: Sequence[Gpu], count: int) -> tuple[list[Gpu], dict[str, str]]:
    """All or none: a job that held some while it waits for more could wait for one that waits for it."""
    folder = runtime_folder("gpus")
    taken: list[tuple[Gpu, int]] = []
    others: dict[str, str] = {}
    with _one_at_a_time(folder):
        for gpu in visible:
            descriptor = _lock(_file(folder, gpu))
            if descriptor is None:
                others[gpu.index] = _holder(_file(folder, gpu))
            else:
                taken.append((gpu, descriptor))
            if len(taken) == count:
                break
        if len(taken) < count:
            for _, descriptor in taken:
                os.close(descriptor)
            return [], others
        for _, descriptor in taken:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} ({' '.join(sys.argv)[:200]})".encode(), 0)
            _held.append(descriptor)
    return [gpu for gpu, _ in taken], {}


def _file(folder: Path, gpu: Gpu) -> Path:
    # By what the hardware is called: another container or job may number it otherwise.
    return folder / f"{(gpu.uuid or gpu.index).replace('/', '-')}.lock"


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    with open(folder / "all.lock", "w") as mutex:
        fcntl.flock(mutex, fcntl.LOCK_EX)
        yield


def _lock(path: Path) -> int | None:
    """Lock the file and keep it open; None when another process has it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        # A cleaner of /tmp may have removed the name in between, and the next job would lock another file.
        with suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        os.close(descriptor)


def _holder(path: Path) -> str:
    with suppress(OSError):
        return path.read_text() or "a process that has not said who it is"
    return "a process that cannot be read"


def _let_go() -> None:
    # A lock is shared with forked children; an engine that outlives its driver is not to keep the lease.
    for descriptor in _held:
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)
