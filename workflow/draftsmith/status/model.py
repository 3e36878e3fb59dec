"""What ``draftsmith status`` tells, as ``--json`` prints it; times in seconds since the epoch, sizes in bytes."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

State = Literal["waiting", "queued", "running", "done", "failed", "stopped", "killed"]


class Told(BaseModel):
    """A part of the answer."""

    model_config = ConfigDict(extra="forbid")


class Gpu(Told):
    """A GPU as the job last saw it."""

    index: str
    name: str
    used: int
    total: int
    busy: int | None = None
    """Per cent of the time in which a kernel ran; None where the driver does not tell."""


class Failure(Told):
    """The first line of an error, and the file that holds the whole of it."""

    line: str
    where: str | None = None


class Job(Told):
    """A rule, or one shard of it."""

    stage: str
    item: str | None = None
    state: State = "waiting"
    started: float | None = None
    ended: float | None = None
    seconds: float | None = None
    """What it took, or has taken so far."""
    updated: float | None = None
    """When it was last heard of."""
    phase: str | None = None
    done: int | None = None
    total: int | None = None
    unit: str | None = None
    batches: int | None = None
    tokens: int | None = None
    bytes: int | None = None
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    failed: int = 0
    """Rows, or whatever ``unit`` says, that failed."""
    failures: list[Failure] = []
    host: str | None = None
    pid: int | None = None
    slurm_job: str | None = None
    gpus: list[Gpu] = []
    log: str | None = None

    @property
    def name(self) -> str:
        """The rule, and which shard."""
        return f"{self.stage} {self.item}" if self.item else self.stage


class Snakemake(Told):
    """What the newest log in .snakemake/log says."""

    log: str
    finished: int | None = None
    total: int | None = None
    active: bool = False
    """Whether the log is being written, or a job is at work or queued while the working folder is locked."""
    locked: bool = False
    """Whether the working folder is locked, and the log has no end: while Snakemake is at work, and after it was killed."""


class Status(Told):
    """A run."""

    format: int = 1
    name: str
    results: str
    time: float
    jobs: list[Job]
    snakemake: Snakemake | None = None

    def count(self, state: State) -> int:
        """How many jobs are in a state."""
        return sum(job.state == state for job in self.jobs)

    @property
    def over(self) -> bool:
        """Whether nothing is running that would change it."""
        return not self.count("running") and not self.count("queued") and not (self.snakemake and self.snakemake.active)
