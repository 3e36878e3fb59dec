"""Who is on the granted GPUs, and whose each process is: never told by its name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import psutil

from draftsmith.errors import DraftsmithError
from draftsmith.gpus import nvml
from draftsmith.processes import Identity, identity, pid_namespace, run_mark

Owner = Literal["foreign", "own", "stranger", "orphan", "self", "hidden"]
_KINDS = {
    "foreign": "another user's",
    "own": "a job of yours that is alive",
    "stranger": "yours, but not of this workflow",
    "orphan": "an orphan of this workflow",
    "self": "this job's",
    "hidden": "not visible from here",
}


@dataclass(frozen=True)
class Holder:
    """A process on a GPU, or on none (''): ``used`` bytes there, or of host memory when on none.

    ``pid`` and ``start`` (clock ticks after boot) are its identity, ``started`` is the same in seconds since the epoch;
    ``run`` is its run's mark, ``job`` what is known of that run's job, both '' for a process of no run.
    """

    gpu: str
    pid: int
    user: str
    command: str
    started: float
    used: int
    owner: Owner
    start: int = 0
    run: str = ""
    job: str = ""

    @property
    def process(self) -> Identity:
        """What signals are sent to."""
        return Identity(self.pid, self.start)

    def sentence(self) -> str:
        """Who it is, for a person."""
        place = f"GPU {self.gpu}: " if self.gpu else ""
        run = f", run {self.run}" if self.run else ""
        job = f", {self.job}" if self.job else ""
        return (
            f"{place}process {self.pid} of {self.user} ({_KINDS[self.owner]}, {self.used / 2**20:.0f} MiB{run}{job}): {self.command}"
        )  # fmt: skip


@dataclass(frozen=True)
class Look:
    """What was found: ``holders`` on the granted GPUs and, of those, GPUs whose processes the driver keeps to itself."""

    holders: list[Holder]
    hidden: list[str]


def look() -> Look:
    """Every process with a compute context on the granted GPUs, as far as NVIDIA's library and /proc show them."""
    found, hidden = [], []
    for device in nvml.devices():
        listed = nvml.processes(device)
        if listed is None:
            hidden.append(device.index)
        found += [describe(device.index, pid, used) for pid, used in listed or []]
    return Look(found, hidden)


def describe(gpu: str, pid: int, used: int) -> Holder:
    """What can be told of a process."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        here = identity(pid)
        if here is None or not here.alive or not _may_be_it(gpu, process):
            return _hidden(gpu, pid, used)
        user, command, started = _user(process), _command(process), process.create_time()
        marks = run_mark.read(pid)
        owner = _owner(process, marks)
        run = "" if marks.any is None else str(marks.any)
        return Holder(gpu, pid, user, command, started, used, owner, here.start, run, _job(marks))
    return _hidden(gpu, pid, used)


def orphans() -> list[Holder]:
    """Processes of this user that a run of this workflow has started and that have outlived it, wherever they are.

    Left out are runs with a process on a GPU that was not granted: that is none of this job's business.
    """
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.uids().real == os.getuid() and _owner(process, run_mark.read(process.pid)) == "orphan":
                found.append(describe("", process.pid, process.memory_info().rss))
    elsewhere = _on_other_gpus() if found else set()
    if elsewhere is None:
        return []
    runs = {holder.run for holder in found if holder.pid in elsewhere}
    return [holder for holder in found if holder.owner == "orphan" and holder.run not in runs]


def trees(holders: Sequence[Holder]) -> list[tuple[Holder, int]]:
    """Those whose parent is not among ``holders``, each with how many of them descend from it.

    A compiler that an import has begun is a shell, a build tool and a dozen compilers; one line is enough for it.
    """
    above: dict[int, set[int]] = {}
    for holder in holders:
        with suppress(psutil.Error):
            above[holder.pid] = {parent.pid for parent in psutil.Process(holder.pid).parents()}
    known = {holder.pid for holder in holders}
    tops = [holder for holder in holders if not known & above.get(holder.pid, set())]
    return [(top, len({pid for pid, parents in above.items() if top.pid in parents})) for top in tops]


def _on_other_gpus() -> set[int] | None:
    """Processes on GPUs that were not granted; None when a driver is there that does not tell."""
    try:
        return {pid for device in nvml.others(nvml.devices()) for pid, _ in nvml.processes(device) or []}
    except nvml.NoDriver:
        return set()
    except DraftsmithError:
        return None


def _owner(process: psutil.Process, marks: run_mark.Marks) -> Owner:
    if process.uids().real != os.getuid():
        return "foreign"
    if _of_this_job(process):
        return "self"
    if marks.any is None:
        return "stranger"
    # Of this very stage, but with a parent that is gone: what an engine left that broke a moment ago.
    mine = run_mark.parse(os.environ.get(run_mark.MARK, ""))
    if run_mark.orphaned(marks) or (mine is not None and marks.stage == mine):
        return "orphan"
    return "own"


def _of_this_job(process: psutil.Process) -> bool:
    # Under torchrun the ranks are children of one agent, and whoever comes last finds the others on their GPUs.
    root = os.getppid() if "RANK" in os.environ else os.getpid()
    above = {parent.pid for parent in process.parents()}
    return process.pid == os.getpid() or bool({root, os.getpid()} & above)


def _may_be_it(gpu: str, process: psutil.Process) -> bool:
    """Whether this process can be the one that NVIDIA's library means.

    In a container the library may give the host's numbers, which are other processes' here: one that has no NVIDIA device
    open is not it.
    """
    if not gpu or not in_container():
        return True
    try:
        opened = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{process.pid}/fd")]
    except PermissionError:
        return True
    except OSError:
        return False
    return any(path.startswith("/dev/nvidia") for path in opened)


def in_container() -> bool:
    """Whether process numbers here are not the host's (the first number space has a fixed id, PROC_PID_INIT_INO)."""
    return pid_namespace() not in (None, "pid:[4026531836]")


def _user(process: psutil.Process) -> str:
    try:
        return str(process.username())
    except KeyError:
        return str(process.uids().real)


def _command(process: psutil.Process) -> str:
    try:
        words = " ".join(process.cmdline())
        # One line, and nothing that a terminal would obey.
        printable = "".join(letter if letter.isprintable() else " " for letter in words)
        return " ".join(printable.split())[:200] or process.name()
    except (psutil.AccessDenied, psutil.ZombieProcess):
        return process.name()


def _job(marks: run_mark.Marks) -> str:
    parts = [f"Slurm job {marks.slurm_job}"] if marks.slurm_job else []
    mark = marks.any
    if mark is not None and mark.local and mark.leader.alive:
        with suppress(psutil.Error):
            parts.append(f"started by process {mark.leader.pid}: {_command(psutil.Process(mark.leader.pid))}")
    elif mark is not None and not mark.local:
        parts.append("started on another host or in another container")
    return ", ".join(parts)


def _hidden(gpu: str, pid: int, used: int) -> Holder:
    return Holder(gpu, pid, "unknown", "not visible from here", 0.0, used, "hidden")
