"""The benchmark files that Snakemake writes: one a job, tab separated, one line a run of the job."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from draftsmith.report.values import total

# The columns' MB are 1024 * 1024 bytes (snakemake/benchmark.py).
_MIB = 2**20
_SCATTERITEM = re.compile(r"\d+-of-(\d+)")


@dataclass(frozen=True)
class Job:
    """One run of a job: wall and CPU seconds, peak resident memory, bytes read from and written to storage.

    None where Snakemake took no sample, as with jobs of less than its interval.
    """

    rule: str
    name: str
    seconds: float | None
    cpu_seconds: float | None
    peak_bytes: float | None
    read_bytes: float | None
    written_bytes: float | None


@dataclass(frozen=True)
class Benchmarks:
    """All jobs of a run, by rule."""

    jobs: dict[str, list[Job]]

    def of(self, rule: str) -> list[Job]:
        """The jobs of a rule; empty when it has no benchmark file."""
        return self.jobs.get(rule, [])

    def seconds(self, rule: str | None = None) -> float | None:
        """Wall seconds of a rule's jobs, or of all, added up; None when nothing was measured."""
        jobs = self.of(rule) if rule else [job for jobs in self.jobs.values() for job in jobs]
        return total([job.seconds for job in jobs])

    def count(self) -> int:
        """How many jobs were measured."""
        return sum(len(jobs) for jobs in self.jobs.values())


def shard_count(item: str) -> int | None:
    """N of a scatteritem ``i-of-N``; None for another name."""
    match = _SCATTERITEM.fullmatch(item)
    return int(match[1]) if match else None


def read(folder: Path, shards: Mapping[str, int]) -> Benchmarks:
    """Read RULE.tsv and RULE/JOB.tsv below ``folder``.

    Files of scattered jobs stay when the number of shards is changed: only those of the number that
    ``shards`` has for their rule count (none or 0: all).
    """
    jobs: dict[str, list[Job]] = {}
    for path in sorted(folder.rglob("*.tsv")):
        parts = path.relative_to(folder).with_suffix("").parts
        of = shard_count(parts[-1])
        if of is not None and of != (shards.get(parts[0]) or of):
            continue
        jobs.setdefault(parts[0], []).extend(_jobs(path, parts[0], "/".join(parts[1:])))
    return Benchmarks(jobs)


def _jobs(path: Path, rule: str, name: str) -> list[Job]:
    with open(path, newline="") as file:
        return [
            Job(
                rule=rule,
                name=name,
                seconds=_number(line, "s"),
                cpu_seconds=_number(line, "cpu_time"),
                peak_bytes=_number(line, "max_rss", _MIB),
                read_bytes=_number(line, "io_in", _MIB),
                written_bytes=_number(line, "io_out", _MIB),
            )
            for line in csv.DictReader(file, delimiter="\t")
        ]


def _number(line: dict[str, str], column: str, unit: float = 1.0) -> float | None:
    # "NA" where nothing was sampled, "-" where the system does not tell.
    try:
        value = float(line.get(column) or "")
    except ValueError:
        return None
    return value * unit if math.isfinite(value) else None
