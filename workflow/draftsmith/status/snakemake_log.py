"""What Snakemake's own log says: steps done, jobs that wait in a queue, rules that failed before they could say so themselves."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from pathlib import Path

from draftsmith.status.files import mtime, tail
from draftsmith.status.model import Snakemake

_STEPS = re.compile(r"^(\d+) of (\d+) steps")
_BLOCK = re.compile(r"^(Error in |local)?rule (\w+):")
_FIELD = re.compile(r"^    (jobid|wildcards|message): (.*)$")
_ITEM = re.compile(r"scatteritem=([\w-]+)")
# A log of jobs that went to Slurm may name them by the paths of their logs alone.
_SUBMITTED = re.compile(
    r"^Job (\d+) has been submitted with SLURM jobid (\S+) \(log: .*/rule_(\w+)(?:/(\d+-of-\d+))?/[^/]+\)"
)
_RUN = re.compile(r"\b(?:results|logs)/([A-Za-z0-9][\w.-]*)/")
# What a job writes is its own run's; what it reads may be another's.
_WRITTEN = re.compile(r"^    (?:output|log): ")
_FINISHED = re.compile(r"^Finished jobid: (\d+)")
# The last line. Snakemake's other farewells are also in the logs of failed jobs, whose own Snakemake ends, and which it shows.
_END = "Complete log"
_BEGUN = ("Select jobs to execute", "Trying to restart job")
_FRESH_SECONDS = 60.0
# Logs of failed jobs are shown within, and every report, unlock and picture leaves a log of its own.
_MOST_BYTES = 1 << 20
_MOST_LOGS = 200
Key = tuple[str, str | None]


@dataclass
class Log:
    """``known`` are the jobs that it names; ``queued``: Slurm's number of a job that was submitted and has not ended; ``failed``: what is said of a rule's failure."""

    summary: Snakemake
    known: list[Key] = field(default_factory=list)
    queued: dict[Key, str] = field(default_factory=dict)
    failed: dict[Key, str] = field(default_factory=dict)


def read(root: Path, name: str) -> Log | None:
    """The newest log with jobs of the run ``name`` in the working folder ``root``; other commands of Snakemake leave logs without."""
    for path in sorted((root / ".snakemake" / "log").glob("*.snakemake.log"), reverse=True)[:_MOST_LOGS]:
        lines = tail(path, _MOST_BYTES)
        written = (line for line in lines if _WRITTEN.match(line))
        named = {match[1] for line in written for match in _RUN.finditer(line)} - {"slurm"}
        if name in named or (not named and any(_SUBMITTED.match(line) for line in lines) and _only(root, name)):
            return _parse(root, path, lines)
    return None


def _only(root: Path, name: str) -> bool:
    """Whether no other run has left anything here."""
    found = {path.name for kind in ("results", "logs") for path in (root / kind).glob("*")}
    return found <= {name, "slurm", "benchmarks"}


def _parse(root: Path, path: Path, lines: list[str]) -> Log:
    log, reader = Log(Snakemake(log=str(path))), _Reader()
    for line in lines:
        if match := _STEPS.match(line):
            log.summary.finished, log.summary.total = int(match[1]), int(match[2])
        reader.take(line)
    log.known = list(reader.names.values())
    log.queued = {reader.names[number]: slurm for number, slurm in reader.queued.items() if number in reader.names}
    log.failed = {reader.names[number]: text for number, text in reader.failed.items() if number in reader.names}
    last = {
        mark: max((n for n, line in enumerate(lines) if line.startswith(mark)), default=-1) for mark in (_END, _BEGUN)
    }
    ended = last[_END] > last[_BEGUN]
    if ended:
        log.queued = {}
    log.summary.locked = not ended and any((root / ".snakemake" / "locks").glob("*.lock"))
    log.summary.active = not ended and time.time() - (mtime(path) or 0.0) < _FRESH_SECONDS
    return log


class _Reader:
    """Goes through the lines; jobs are known by Snakemake's numbers, which a block names in one of its fields."""

    def __init__(self) -> None:
        self.names: dict[str, Key] = {}
        self.queued: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self._rule = self._number = self._message = ""
        self._error = False

    def take(self, line: str) -> None:
        """The next line."""
        if match := _BLOCK.match(line):
            self._error, self._rule, self._number, self._message = match[1] == "Error in ", match[2], "", ""
        elif match := _SUBMITTED.match(line):
            self.queued[match[1]], self.names[match[1]] = match[2], (match[3], match[4])
            self.failed.pop(match[1], None)
        elif match := _FINISHED.match(line):
            self.queued.pop(match[1], None)
            self.failed.pop(match[1], None)
        elif self._rule and (match := _FIELD.match(line)):
            self._field(match[1], match[2])
        elif not line.startswith(" "):
            self._rule = ""

    def _field(self, name: str, value: str) -> None:
        if name == "message":
            # Snakemake writes None where it has nothing to say.
            self._message = "" if value == "None" else value
        elif name == "jobid":
            self._number = value
            if not self._error:
                self.names[value] = (self._rule, None)
                # It runs, for the first time or again.
                self.failed.pop(value, None)
                return
            self.names.setdefault(value, (self._rule, None))
            self.queued.pop(value, None)
            self.failed[value] = f"Error in rule {self._rule}" + (f": {self._message}" if self._message else "")
        elif self._number and (item := _ITEM.search(value)):
            self.names[self._number] = (self._rule, item[1])
