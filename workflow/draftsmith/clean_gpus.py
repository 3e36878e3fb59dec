"""clean_gpus: who holds the granted GPUs, and what may be done about it.

Only the GPUs that this job was granted are looked at. A process of another user, or one of our own with a living parent,
is named and left alone. Only an orphan that a Draftsmith run has started (known by a variable in its environment, its
user and its start time, never by its name) is ended, and only when ``clean.kill_orphans`` says so.
"""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from draftsmith import hardware
from draftsmith.config import Config
from draftsmith.errors import DraftsmithError
from draftsmith.files import write_json
from draftsmith.log import log

# Set for every process that a stage starts; a process that carries it is of this workflow.
MARK = "DRAFTSMITH_RUN"
_TITLE = re.compile(rf"{MARK}=(\d+-\d+)::")
_TERM_SECONDS, _FREE_SECONDS = 15.0, 30.0

Owner = Literal["foreign", "own", "orphan", "self"]


@dataclass(frozen=True)
class Holder:
    """A process on a GPU, or on none (''): memory in bytes, start time in seconds since the epoch (with the pid it is the identity)."""

    gpu: str
    pid: int
    user: str
    command: str
    started: float
    used: int
    owner: Owner

    def sentence(self) -> str:
        """Who it is, for a person."""
        kind = {
            "foreign": "another user's",
            "own": "your own, alive",
            "orphan": "an orphan of this workflow",
            "self": "this job's",
        }[self.owner]
        place = f"GPU {self.gpu}: " if self.gpu else ""
        return f"{place}process {self.pid} of {self.user} ({kind}, {self.used / 2**20:.0f} MiB): {self.command}"


def mark_run() -> str:
    """Mark this process and all that it will start as this run's; gives the mark: its leader's pid and a time after its start."""
    return os.environ.setdefault(MARK, f"{os.getpid()}-{int(time.time())}")


def check(config: Config) -> list[Holder]:
    """Make sure that nothing holds the granted GPUs; called at the start of every GPU job.

    Returns the processes that were found and are gone now. Raises :class:`DraftsmithError` naming those that stay, or the
    memory that is held by nobody to be seen.
    """
    mark_run()
    if config.engine.device == "cpu" or hardware.device() == "cpu":
        return _others(config)
    found = [holder for holder in holders() if holder.owner != "self"]
    staying = [holder for holder in found if holder.owner != "orphan"]
    left = [holder for holder in found if holder.owner == "orphan"]
    if staying:
        raise DraftsmithError(
            "the granted GPUs are in use; end these yourself or ask for other GPUs: "
            + "; ".join(h.sentence() for h in staying)
        )
    if left and not config.clean.kill_orphans:
        raise DraftsmithError(
            "an earlier run left processes on the granted GPUs; end them, or set clean.kill_orphans: true: "
            + "; ".join(h.sentence() for h in left)
        )
    for orphan in left:
        log(f"clean: ending {orphan.sentence()}")
        end(orphan)
    _await_free(config)
    return left + _others(config)


def _others(config: Config) -> list[Holder]:
    """Orphans that hold no granted GPU, which only cost memory and cores: named, or ended when the config says so."""
    elsewhere = _on_other_gpus()
    found = [orphan for orphan in orphans() if orphan.pid not in elsewhere]
    for orphan in found:
        if config.clean.kill_orphans:
            log(f"clean: ending {orphan.sentence()}")
            end(orphan)
        else:
            log(f"clean: an earlier run left {orphan.sentence()}; end it, or set clean.kill_orphans: true")
    return found if config.clean.kill_orphans else []


def _on_other_gpus() -> set[int]:
    """Processes on GPUs that this job was not granted: none of its business."""
    import pynvml

    granted = {gpu.index for gpu in hardware.gpus()}
    pids: set[int] = set()
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            if str(index) not in granted:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                pids |= {int(process.pid) for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    return pids


def orphans() -> list[Holder]:
    """Processes of this user that a run of this workflow has started and that have outlived it; ``used`` is host memory."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.uids().real == os.getuid() and _owner(process) == "orphan":
                found.append(describe("", process.pid, process.memory_info().rss))
    return found


def holders() -> list[Holder]:
    """Processes with a compute context on the granted GPUs, as far as NVML and /proc show them."""
    import pynvml

    found = []
    for gpu in hardware.gpus():
        handle = pynvml.nvmlDeviceGetHandleByIndex(int(gpu.index))
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            found.append(describe(gpu.index, int(process.pid), int(process.usedGpuMemory or 0)))
    return found


def describe(gpu: str, pid: int, used: int) -> Holder:
    """What can be told of a process; one that cannot be read counts as another user's."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            owner = _owner(process)
            return Holder(
                gpu, pid, process.username(), " ".join(process.cmdline())[:200], process.create_time(), used, owner
            )
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return Holder(gpu, pid, "unknown", "not visible from here", 0.0, used, "foreign")


def _owner(process: psutil.Process) -> Owner:
    if process.uids().real != os.getuid():
        return "foreign"
    if process.pid == os.getpid() or os.getpid() in {parent.pid for parent in process.parents()}:
        return "self"
    # vLLM's processes lose their environment to the title that they give themselves; the mark is in that.
    titled = _TITLE.search(" ".join(process.cmdline()))
    run = titled[1] if titled else process.environ().get(MARK, "")
    if not re.fullmatch(r"\d+-\d+", run):
        return "own"
    # The run's first process is in the mark; while it lives, its children are no orphans.
    leader, since = (int(part) for part in run.split("-"))
    with suppress(psutil.NoSuchProcess):
        if (
            abs(psutil.Process(leader).create_time() - since) < 3600
            and psutil.Process(leader).create_time() <= since + 1
        ):
            return "own"
    return "orphan"


def end(holder: Holder) -> None:
    """SIGTERM, wait, SIGKILL: to the process with this pid and this start time, to no other."""
    for number, seconds in ((signal.SIGTERM, _TERM_SECONDS), (signal.SIGKILL, 5.0)):
        try:
            process = psutil.Process(holder.pid)
            if process.create_time() != holder.started:
                return
            process.send_signal(number)
            process.wait(seconds)
            return
        except psutil.NoSuchProcess:
            return
        except psutil.TimeoutExpired:
            continue
    raise DraftsmithError(f"{holder.sentence()} did not end; look at it yourself")


def _await_free(config: Config) -> None:
    deadline = time.monotonic() + _FREE_SECONDS
    limit = config.clean.max_used_mib * 2**20
    while True:
        hardware.gpus.cache_clear()
        held = [gpu for gpu in hardware.gpus() if gpu.used > limit]
        if not held:
            return
        if time.monotonic() > deadline:
            raise DraftsmithError(
                "memory is held on the granted GPUs by no process that can be seen from here (another container's?): "
                + ", ".join(f"GPU {gpu.index} {gpu.used / 2**20:.0f} MiB" for gpu in held)
                + f"; free it, or raise clean.max_used_mib ({config.clean.max_used_mib})"
            )
        time.sleep(1.0)


def run(config: Config, *, report: Path) -> None:
    """Check, and write what was found as JSON."""
    gone = check(config)
    gpus = [asdict(gpu) for gpu in hardware.gpus()]
    result: dict[str, Any] = {"gpus": gpus, "ended": [asdict(holder) for holder in gone]}
    write_json(report, result)
    log(f"clean: {len(gpus)} GPUs granted and free" if gpus else "clean: no GPU here, nothing to clean")
