"""Needs of the jobs against the limits that they are submitted with, and those against the limits of their partitions."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass

import psutil

from draftsmith.estimate.jobs import Asked
from draftsmith.estimate.model import Check, Time

_SECONDS = 5.0
_MB = 10**6


def here() -> bool:
    """Whether this machine belongs to a Slurm cluster that answers."""
    return bool(shutil.which("sbatch") and _sinfo("--format", "%P"))


@dataclass(frozen=True)
class Partition:
    """Limits of a partition's largest node: minutes (None: no limit), memory in MiB, GPUs."""

    minutes: float | None
    memory_mib: int | None
    gpus: int | None


def checks(times: list[Time], memory: dict[str, int], asked: Asked) -> list[Check]:
    """``memory`` are bytes on the host by rule."""
    if asked.why:
        return [Check(name="limits of the jobs", status="unknown", detail=asked.why)]
    found = []
    if not any("slurm_partition" in resources for resources in asked.resources.values()):
        # On one machine nothing ends a job that takes long; only the memory must be there.
        return [
            _compared(f"{rule}: memory", need, psutil.virtual_memory().total, "this machine has")
            for rule, need in memory.items()
        ]
    for time in times:
        found += _time(time, asked)
    for rule, need in memory.items():
        found += _memory(rule, need, asked)
    partitions: dict[str, Partition | None] = {}
    for rule, resources in asked.resources.items():
        name = resources.get("slurm_partition", "")
        if name:
            if name not in partitions:
                partitions[name] = partition(name)
            found += _partition(rule, name, partitions[name], asked)
    for name, limits in partitions.items():
        if limits is None and shutil.which("sinfo"):
            found.append(
                Check(
                    name=f"partition {name}",
                    status="unknown",
                    detail=f"sinfo tells of no partition {name}; DRAFTSMITH_GPU_PARTITION and DRAFTSMITH_CPU_PARTITION name them",
                )
            )
    return found


def _time(time: Time, asked: Asked) -> list[Check]:
    limit = asked.number(time.stage, "runtime")
    if limit is None or time.seconds is None:
        return []
    need = time.seconds / 60
    if need < 0.05 * limit and time.rate is None:
        # Not worth a line.
        return []
    status = "fail" if need > limit else "warn" if need > 0.8 * limit else "ok"
    detail = f"about {need:,.0f} minutes are needed, {limit:,} are asked for"
    if status == "fail" and time.stage in _RESUMES:
        # Each retry goes on where the last one was ended, and is given more time.
        status, detail = (
            "warn",
            f"{detail}: it will be ended and go on by a retry; more shards or a longer runtime spare that",
        )
    elif status == "fail":
        detail += f"; raise it: --set-resources {time.stage}:runtime={round(need * 1.3)}"
    return [Check(name=f"{time.stage}: time", status=status, detail=detail)]  # type: ignore[arg-type]


_RESUMES = ("regenerate", "extract_shard", "train_draft")


def _memory(rule: str, need: int, asked: Asked) -> list[Check]:
    limit = asked.number(rule, "mem_mb")
    if limit is None:
        return []
    mend = f"raise it: --set-resources {rule}:mem_mb={round(need * 1.25 / _MB)}"
    return [_compared(f"{rule}: memory", need, limit * _MB, "the job asks for", mend)]


def _compared(name: str, need: int, have: int, whose: str, mend: str = "take another machine") -> Check:
    detail = f"about {need / 1e9:,.1f} GB of host memory are needed, {whose} {have / 1e9:,.1f} GB"
    if need > have:
        return Check(name=name, status="fail", detail=f"{detail}; {mend}")
    return Check(name=name, status="warn" if need > 0.8 * have else "ok", detail=detail)


def _partition(rule: str, name: str, limits: Partition | None, asked: Asked) -> list[Check]:
    """Only what does not fit is told: Slurm would let it wait without end, or refuse it."""
    if limits is None:
        return []
    told = []
    runtime, memory, gpus = (asked.number(rule, resource) for resource in ("runtime", "mem_mb", "gpu"))
    if gpus:
        gpus = -(-gpus // asked.nodes(rule))
    if runtime is not None and limits.minutes is not None and runtime > limits.minutes:
        told.append(f"{runtime:,} minutes are asked for, the partition {name} allows {limits.minutes:,.0f}")
    if memory is not None and limits.memory_mib is not None and memory > limits.memory_mib:
        told.append(f"{memory:,} MB are asked for, no node of the partition {name} has more than {limits.memory_mib:,}")
    if gpus and limits.gpus is not None and gpus > limits.gpus:
        told.append(
            f"{gpus} GPUs on one node are asked for, no node of the partition {name} has more than {limits.gpus}"
        )
    return [Check(name=f"{rule}: partition", status="fail", detail=text) for text in told]


def partition(name: str) -> Partition | None:
    """What ``sinfo`` says of a partition; None when it is not there or does not know it."""
    lines = _sinfo("--partition", name, "--format", "%l|%m|%G")
    nodes = [line.split("|") for line in lines if line.count("|") == 2]
    if not nodes:
        return None
    times = [minutes(limit) for limit, _, _ in nodes]
    memory = [int(found[0]) for _, size, _ in nodes if (found := re.findall(r"\d+", size))]
    return Partition(
        None if None in times else max(time for time in times if time is not None),
        max(memory, default=None),
        max(_gpus(gres) for _, _, gres in nodes),
    )  # fmt: skip


def _sinfo(*arguments: str) -> list[str]:
    """Lines of ``sinfo``; none where it is not, or its cluster does not answer."""
    try:
        done = subprocess.run(["sinfo", "--noheader", *arguments], capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def _gpus(gres: str) -> int:
    """GPUs in Slurm's ``gpu:h200:8(S:0-1),lustre:1``."""
    entries = (re.sub(r"\(.*?\)", "", entry).split(":") for entry in re.split(r",(?![^(]*\))", gres))
    return sum(int(entry[-1]) if entry[-1].isdigit() else 1 for entry in entries if entry[0] == "gpu")


def minutes(limit: str) -> float | None:
    """Minutes of Slurm's ``[days-]hours:minutes:seconds``, ``minutes:seconds`` or ``minutes``; None for no limit."""
    days, dash, rest = limit.strip().rpartition("-")
    parts = rest.split(":")
    if not all(part.isdigit() for part in parts) or (dash and not days.isdigit()):
        return None
    numbers = [int(part) for part in parts]
    if dash:
        hours, mins, seconds = [*numbers, 0, 0][:3]
        return int(days) * 1440 + hours * 60 + mins + seconds / 60
    if len(numbers) == 3:
        return numbers[0] * 60 + numbers[1] + numbers[2] / 60
    return numbers[0] + (numbers[1] / 60 if len(numbers) == 2 else 0)
