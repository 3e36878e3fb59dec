"""What ``draftsmith status`` shows to people: a table on a terminal, a line a job elsewhere."""

from __future__ import annotations

import time

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from draftsmith.status.model import Job, Status
from draftsmith.terminal import size

_STYLE = {
    "waiting": "dim", "queued": "cyan", "running": "bold blue", "done": "green", "failed": "bold red", "stopped": "yellow",
    "killed": "bold red",
}  # fmt: skip

_MEND = "its lock is still there: look for its jobs, on Slurm with squeue, then run snakemake --unlock"


def table(status: Status) -> RenderableType:
    """The run as a table, with what failed below it."""
    made = Table(box=None, pad_edge=False, title=f"{status.results}, {clock(status.time)}", title_justify="left")
    for name in ("stage", "state", "done", "speed", "left", "took", "GPUs"):
        made.add_column(name, justify="right" if name in ("speed", "left", "took") else "left", overflow="fold")
    for job in status.jobs:
        made.add_row(
            job.name,
            Text(job.state, style=_STYLE[job.state]),
            work(job),
            speed(job),
            duration(job.seconds_left),
            duration(job.seconds),
            gpus(job),
            style="dim" if job.state == "waiting" else "",
        )
    return Group(made, *(Text(line) for line in below(status)))


def plain(status: Status) -> list[str]:
    """The run as lines without colours or columns."""
    lines = [f"{clock(status.time)} {status.results}"]
    for job in status.jobs:
        took, left = duration(job.seconds), duration(job.seconds_left)
        parts = [work(job), speed(job), f"{left} left" if left else "", took, gpus(job)]
        lines.append(f"{job.name}: {job.state}" + "".join(f", {part}" for part in parts if part))
    return lines + below(status)


def below(status: Status) -> list[str]:
    """Failures with where the whole of each is, and what Snakemake says."""
    lines = []
    for job in status.jobs:
        for failure in job.failures:
            # A stage's own sentence may begin with its name.
            said = failure.line.removeprefix(f"{job.stage}: ")
            lines.append(f"{job.name}: {said}" + (f"\n    the whole: {failure.where}" if failure.where else ""))
    if status.snakemake is not None:
        told = status.snakemake
        steps = f"{told.finished} of {told.total} steps done" if told.total is not None else "no step done yet"
        does = "is at work" if told.active else f"was killed, or says nothing ({_MEND})" if told.locked else "has ended"
        lines.append(f"Snakemake {does}: {steps}; {told.log}")
    return lines


def work(job: Job) -> str:
    """How far it is."""
    parts = [job.phase] if job.phase else []
    if job.done is not None:
        share = f" ({job.done / job.total:.0%})" if job.total and job.state != "done" else ""
        of = f"/{job.total:,}" if job.total is not None and job.state != "done" else ""
        parts.append(f"{job.done:,}{of} {job.unit or ''}{share}".rstrip())
    if job.batches is not None:
        parts.append(f"{job.batches:,} batches")
    if job.bytes is not None:
        parts.append(size(job.bytes))
    if job.failed:
        parts.append(f"{job.failed:,} failed")
    return ", ".join(parts)


def speed(job: Job) -> str:
    """Tokens per second."""
    return "" if job.tokens_per_second is None else f"{job.tokens_per_second:,.0f} tokens/s"


def gpus(job: Job) -> str:
    """Memory and load of each GPU, those that are alike together."""
    counts: dict[str, int] = {}
    for gpu in job.gpus:
        busy = "" if gpu.busy is None else f", {gpu.busy} % busy"
        text = f"{gpu.used / 2**30:.0f}/{gpu.total / 2**30:.0f} GiB{busy}"
        counts[text] = counts.get(text, 0) + 1
    return "; ".join(f"{count} x {text}" if len(job.gpus) > 1 else text for text, count in counts.items())


def clock(seconds: float) -> str:
    """Local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def duration(seconds: float | None) -> str:
    """A length of time in its two largest units; empty for none."""
    if seconds is None:
        return ""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
