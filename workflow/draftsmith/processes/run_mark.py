"""The marks by which processes of this workflow are known: in their environment, or in the title that vLLM gives its own.

A mark names a run's first process by number and start time, and the place where that number means something: an engine's
driver is gone when its mark's leader is, and a number from another host or container tells nothing here.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from draftsmith.processes import Identity, pid_namespace, this

MARK = "DRAFTSMITH_RUN"
"""A stage's mark; every process that the stage starts carries it."""
WORKFLOW = "DRAFTSMITH_WORKFLOW"
"""The mark of the Snakemake that started a stage."""
LEASED = "DRAFTSMITH_LEASED"
"""The mark of the run whose GPUs CUDA_VISIBLE_DEVICES names; its processes take no lease of their own."""
_TEXT = re.compile(r"(\d+)-(\d+)-([0-9a-f]{8})")
_TITLE = re.compile(rf"{MARK}=({_TEXT.pattern})::")
# Slurm keeps each job in a control group of its own.
_SLURM = re.compile(r"/job_(\d+)(?:/|$)", re.MULTILINE)


@dataclass(frozen=True)
class Mark:
    """What a mark says: its first process, and where that lived."""

    leader: Identity
    place: str

    def __str__(self) -> str:
        return f"{self.leader.pid}-{self.leader.start}-{self.place}"

    @property
    def local(self) -> bool:
        """Whether its numbers are those of this host and container."""
        return self.place == here()

    @property
    def ended(self) -> bool:
        """Whether its first process is known to be gone."""
        return self.local and not self.leader.alive


@dataclass(frozen=True)
class Marks:
    """What a process carries: the mark of its stage, that of its Snakemake, and the Slurm job that it belongs to ('')."""

    stage: Mark | None
    workflow: Mark | None
    slurm_job: str

    @property
    def any(self) -> Mark | None:
        """The stage's mark, or its Snakemake's where a stage has not come to set its own."""
        return self.stage or self.workflow


@cache
def here() -> str:
    """8 hex digits for this boot of this host and this process's number space; 0 where a kernel does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        boot = "0"
    parts = [boot, pid_namespace() or "0"]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]


def parse(text: str) -> Mark | None:
    """A mark from its text; None for anything else."""
    found = _TEXT.fullmatch(text)
    return None if found is None else Mark(Identity(int(found[1]), int(found[2])), found[3])


def own() -> Mark:
    """A mark with this process as its first."""
    return Mark(this(), here())


def mark_run() -> str:
    """Mark this process and all that it will start as one run's; gives the mark's text.

    An inherited mark is kept while its first process lives, as a stage may start another; otherwise this one is the first.
    """
    inherited = parse(os.environ.get(MARK, ""))
    if inherited is None or not inherited.local or inherited.ended:
        os.environ[MARK] = str(own())
    return os.environ[MARK]


def read(pid: int) -> Marks:
    """What the process carries, as far as it may be read."""
    environment = dict(
        entry.partition("=")[::2] for entry in _text(pid, "environ").split("\0") if entry.startswith((MARK, WORKFLOW, "SLURM_JOB_ID"))
    )  # fmt: skip
    # vLLM's processes lose their environment to the title that they give themselves; the mark is in that.
    titled = _TITLE.search(_text(pid, "cmdline").replace("\0", " "))
    stage = parse(titled[1] if titled else environment.get(MARK, ""))
    job = environment.get("SLURM_JOB_ID", "")
    if not job and (found := _SLURM.search(_text(pid, "cgroup"))):
        job = found[1]
    return Marks(stage, parse(environment.get(WORKFLOW, "")), job)


def orphaned(marks: Marks) -> bool:
    """Whether the stage, or the Snakemake that waits for it, is gone."""
    if marks.stage is None:
        return marks.workflow is not None and marks.workflow.ended
    if marks.stage.ended:
        return True
    if not marks.stage.local:
        return False
    above = marks.workflow or read(marks.stage.leader.pid).workflow
    return above is not None and above.ended


def _text(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""
