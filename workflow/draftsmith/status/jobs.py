"""The state of each job, from what it says of itself, from its outputs, and from logs where it has said nothing."""

from __future__ import annotations

import re
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from draftsmith.processes import pid_namespace
from draftsmith.progress_file import BEAT_SECONDS, COUNTS
from draftsmith.status import files
from draftsmith.status.model import Failure, Gpu, Job
from draftsmith.status.snakemake_log import Log
from draftsmith.status.stages import STAGES, Stage, figures

# A sign of life that is older was left by a process that is gone; network file systems show a new one up to a minute late.
STALE_SECONDS = 120.0
_ITEM = re.compile(r"\d+-of-(\d+)")
_COUNTS = ("phase", "done", "total", "unit", "batches", "tokens", "bytes", "tokens_per_second", "seconds_left")


class Places:
    """Where a run's files lie: ``results`` is results/NAME."""

    def __init__(self, results: Path) -> None:
        self.results, self.name = results, results.name
        self.root = results.parent.parent
        self.logs = self.root / "logs" / self.name
        self.progress = self.logs / "progress"
        self.benchmarks = self.root / "benchmarks" / "rules" / self.name

    def log(self, stage: str, item: str | None) -> Path:
        """The log of a rule."""
        return self.logs / stage / f"{item}.log" if item else self.logs / f"{stage}.log"

    def life(self, stage: str, item: str | None) -> Path:
        """The file by which a job says that it lives."""
        return self.progress / f"{stage}{f'.{item}' if item else ''}.json"


def jobs(places: Places, log: Log | None) -> list[Job]:
    """Every job of the run, in the order of the rules."""
    found: list[Job] = []
    for stage in STAGES:
        for item in _items(places, stage, log) if stage.scattered else [None]:
            job = _job(places, stage, item, log)
            shown = any(other.stage == stage.beside for other in found)
            if not stage.optional or job.state != "waiting" or shown:
                found.append(job)
    return found


def _items(places: Places, stage: Stage, log: Log | None) -> list[str | None]:
    """The shards of the newest split; files of another number of shards stay from before it was changed."""
    paths = [
        *(places.logs / stage.name).glob("*.log"),
        *places.progress.glob(f"{stage.name}.*.json"),
        *(places.results / stage.output).parent.glob("*.json"),
    ]
    seen: dict[str, float] = {}
    if log is not None:
        written = files.mtime(Path(log.summary.log)) or 0.0
        seen = {item: written for name, item in log.known if name == stage.name and item}
    for path in paths:
        item = path.name.removeprefix(f"{stage.name}.").split(".")[0]
        if _ITEM.fullmatch(item):
            seen[item] = max(seen.get(item, 0.0), files.mtime(path) or 0.0)
    if not seen:
        return [None]
    count = int(max(seen, key=lambda item: seen[item]).split("-of-")[1])
    return [f"{place}-of-{count}" for place in range(1, count + 1)]


def _job(places: Places, stage: Stage, item: str | None, log: Log | None) -> Job:
    job = Job(stage=stage.name, item=item)
    output = places.results / stage.output.format(item=item)
    made = files.mtime(output)
    own_log = places.log(stage.name, item)
    if own_log.is_file():
        job.log = str(own_log)
    life = files.json_object(places.life(stage.name, item)) or {}
    if life.get("format") == 1 and isinstance(life.get("started"), int | float):
        _from_life(job, life)
        _from_counts(job, places, life)
    if made is not None and job.state != "running" and made >= (job.started or 0.0):
        job.state, job.ended, job.failures = "done", job.ended or made, []
    elif made is None and job.state == "done":
        # Its output was removed: it will run again.
        job = Job(stage=stage.name, item=item, log=job.log)
    elif not life:
        _from_log(job, places, stage)
    if log is not None:
        _from_snakemake(job, life, log)
    if job.state == "done":
        _finished(job, places, stage, output)
    elif job.started is not None:
        job.seconds = (job.ended or (job.updated if job.state == "killed" else None) or time.time()) - job.started
    return job


def _from_life(job: Job, life: dict[str, Any]) -> None:
    state = life.get("state")
    updated = life.get("updated")
    job.started, job.ended = life["started"], life.get("ended")
    job.host, job.pid, job.slurm_job = life.get("host"), life.get("pid"), life.get("slurm_job")
    job.updated = updated if isinstance(updated, int | float) else job.started
    job.log = life.get("log") or job.log
    with suppress(ValidationError, TypeError):
        job.gpus = [Gpu.model_validate(gpu) for gpu in life.get("gpus") or []]
    if state == "running":
        job.state = "running" if _alive(life, job.updated or 0.0) else "killed"
    elif state in ("done", "failed", "stopped"):
        job.state = state
    if job.state != "running":
        # What the GPUs did then says nothing of now.
        job.gpus = []
    if state == "failed":
        job.failures = [Failure(line=str(life.get("error") or "no reason was given"), where=job.log)]
    if job.state == "killed":
        job.failures = [
            Failure(line=f"{_who(job)} is gone and has not said why: it was killed, or its node died", where=job.log)
        ]


def _who(job: Job) -> str:
    return f"process {job.pid} on {job.host}" + (f" (Slurm job {job.slurm_job})" if job.slurm_job else "")


def _alive(life: dict[str, Any], updated: float) -> bool:
    """Whether the process behind a file that says 'running' is there: looked up where it can be, else by the file's age."""
    beat = life.get("beat_seconds") or BEAT_SECONDS
    if time.time() - updated > max(STALE_SECONDS, 4 * beat):
        return False
    here = life.get("host") == socket.gethostname() and life.get("pid_namespace") == pid_namespace() is not None
    if not here or not isinstance(life.get("pid"), int):
        return True
    import psutil

    try:
        # A pid may have passed to another process.
        started = psutil.Process(life["pid"]).create_time()
        return life.get("pid_started") is None or abs(started - life["pid_started"]) < 1.0
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True


def _from_counts(job: Job, places: Places, life: dict[str, Any]) -> None:
    path = places.life(job.stage, job.item)
    counts = files.json_object(path.with_name(path.name.removesuffix(".json") + COUNTS)) or {}
    # Those of an earlier try say nothing of this one.
    if not isinstance(counts.get("time"), int | float) or counts["time"] < life["started"]:
        return
    with suppress(ValidationError):
        values = {name: counts.get(name) for name in _COUNTS} | {"failed": counts.get("failed") or 0}
        checked = Job.model_validate({"stage": job.stage, **values})
        for name in values:
            setattr(job, name, getattr(checked, name))
        job.failures += [Failure(line=str(line), where=job.log) for line in counts.get("failures") or []]
    if job.state != "running":
        job.seconds_left = job.phase = None


def _from_log(job: Job, places: Places, stage: Stage) -> None:
    """The state of a job that was not asked to say anything of itself, by its log and by what it left when it failed."""
    failed = files.mtime(places.results / stage.failed) if stage.failed else None
    log = places.log(job.stage, job.item)
    written = files.mtime(log)
    if written is None and failed is None:
        return
    job.ended = job.updated = max(time_ for time_ in (written, failed) if time_ is not None)
    error = files.last_error(log)
    if error is not None or failed is not None:
        job.state = "failed"
        where = job.log or str(places.results / str(stage.failed))
        job.failures = [Failure(line=error or f"{stage.failed} was written", where=where)]
    elif time.time() - job.updated < STALE_SECONDS:
        job.state, job.ended = "running", None
    else:
        job.state = "killed"
        job.failures = [Failure(line="its log ends without a result and without an error", where=job.log)]


def _from_snakemake(job: Job, life: dict[str, Any], log: Log) -> None:
    key = (job.stage, job.item)
    slurm = log.queued.get(key)
    if slurm is not None and job.state != "running" and slurm != life.get("slurm_job"):
        job.state, job.slurm_job, job.failures, job.started, job.ended = "queued", slurm, [], None, None
    elif key in log.failed and job.state == "waiting":
        job.state = "failed"
        job.failures = [Failure(line=log.failed[key], where=job.log or log.summary.log)]


def _finished(job: Job, places: Places, stage: Stage, output: Path) -> None:
    # The last that a job told of itself may be of a part of its work.
    if stage.figures and (content := files.json_object(output)):
        for name, value in figures(stage, content).items():
            setattr(job, name, value)
    if job.started is not None and job.ended is not None:
        job.seconds = job.ended - job.started
    else:
        path = (
            places.benchmarks / stage.name / f"{job.item}.tsv" if job.item else places.benchmarks / f"{stage.name}.tsv"
        )
        job.seconds = files.benchmark_seconds(path)
    job.seconds_left = None
