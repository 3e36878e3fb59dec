"""Brings every row of a shard into the store or into the ledger, however often the engine has to be started for it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith import clean_gpus, engine, store
from draftsmith.config import Config
from draftsmith.errors import DraftsmithError
from draftsmith.extract_shard import ledger, plan
from draftsmith.extract_shard.plan import PlannedRow
from draftsmith.extract_shard.progress import Progress
from draftsmith.extract_shard.publish import HeadCheck, Publisher
from draftsmith.extract_shard.session import Session
from draftsmith.extract_shard.space import Room, held, is_full, states_bytes
from draftsmith.extract_shard.staging import staging
from draftsmith.extract_shard.tries import Tries, remembered, suspects
from draftsmith.log import log
from draftsmith.processes.scratch import scratch
from draftsmith.signals import Termination


class ExtractionFailed(DraftsmithError):
    """The engine gave up; the message holds every traceback that was found, the earliest last."""


@dataclass(frozen=True)
class Job:
    """What is to be extracted. ``tokens`` gives a row's token ids, ``stored`` is (dtype, storage) of the store, ``per_token`` a token's bytes there."""

    config: Config
    target: dict[str, Any]
    folder: Path
    fingerprint: str
    stored: tuple[str, store.Storage]
    rows: Sequence[PlannedRow]
    batch_tokens: int
    per_token: int
    tokens: dict[str, list[int]]
    scatteritem: str


@dataclass
class Outcome:
    """What came of a job: figures for the manifest, failed rows with their entries, and why it was ended early, if it was."""

    figures: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, dict[str, Any]] = field(default_factory=dict)
    stopped: str | None = None


def extract(job: Job, termination: Termination) -> Outcome:
    """Extract all rows of ``job``.

    A crash of the engine is followed by a new start, as long as each start brings something: rows that were in the step that
    failed are tried again alone, in the end, and left out when they fail again. Raises :class:`ExtractionFailed` otherwise;
    what was published stays. Once ``termination`` was asked there is no further start, and no row is blamed for a crash.
    """
    settings = job.config.extract
    tries = Tries(settings.max_tries, remembered(job.folder))
    outcome = Outcome(figures={"batches": 0, "tokens": 0, "bytes": 0, "load_seconds": 0.0, "seconds": 0.0, "starts": 0})
    present: set[str] = set()
    while True:
        free, alone = tries.split(plan.missing(job.rows, present))
        if not free and not alone:
            break
        if termination.asked:
            outcome.stopped = termination.name
            break
        outcome.figures["starts"] += 1
        with staging(job.folder, job.scatteritem) as stage, scratch() as sockets:
            engine.prepare_environment(job.config, sockets)
            attempt = _Attempt(job, stage, tries, termination)
            crash = attempt.run(free, alone)
        _add(outcome.figures, attempt.figures())
        present |= attempt.publisher.published
        outcome.failed = attempt.failed_rows() | tries.quarantined
        outcome.failed = {row: entry for row, entry in outcome.failed.items() if row not in present}
        if attempt.stopped:
            outcome.stopped = attempt.stopped
            if crash is not None:
                log(crash)
            break
        if crash is None:
            break
        brought = attempt.publisher.batches or attempt.newly_quarantined
        if not brought or outcome.figures["starts"] >= settings.max_engine_starts or attempt.full:
            raise ExtractionFailed(crash)
        log(
            f"{crash}\nextract: starting the engine again; start {outcome.figures['starts'] + 1} of at most {settings.max_engine_starts}"
        )
        clean_gpus.check(job.config)
    seconds = outcome.figures["seconds"]
    outcome.figures["tokens_per_second"] = round(outcome.figures["tokens"] / seconds, 1) if seconds else 0.0
    return outcome


def _add(total: dict[str, Any], more: dict[str, Any]) -> None:
    """Sum up figures of several starts, those within figures too; what is no number is the last start's."""
    for name, value in more.items():
        known = total.get(name)
        if isinstance(value, dict):
            total[name] = dict(known) if isinstance(known, dict) else {}
            _add(total[name], value)
        elif isinstance(value, int | float) and not isinstance(value, bool) and known is not None:
            total[name] = round(known + value, 3)
        else:
            total[name] = value


class _Attempt:
    """One start of the engine, and all that it can do."""

    def __init__(self, job: Job, stage: Path, tries: Tries, termination: Termination) -> None:
        self.job, self.stage, self.tries, self.termination = job, stage, tries, termination
        dtype, storage = job.stored
        dummy = engine.dummy_weights(job.config)
        check = None if dummy else HeadCheck(Path(job.target["path"]), "fp8" if storage == "fp8" else dtype)
        self.publisher = Publisher(stage, job.folder, check, job.config.extract.verify_rows)
        self.progress = Progress()
        self.stopped: str | None = None
        self.full = False
        self.newly_quarantined = 0
        self._to_write = 0
        self._blamed: set[str] = set()
        self._load_seconds = self._run_seconds = 0.0
        self._more: dict[str, Any] = {}
        self._entries: list[dict[str, Any]] = []

    def figures(self) -> dict[str, Any]:
        """Figures of this start; those of the manifest add up over starts."""
        return {
            "batches": self.publisher.batches, "tokens": self.publisher.tokens, "bytes": self.publisher.bytes,
            "load_seconds": round(self._load_seconds, 2), "seconds": round(self._run_seconds, 2),
        }  | self._more  # fmt: skip

    def failed_rows(self) -> dict[str, dict[str, Any]]:
        """Rows that could not be written or published, with their entries."""
        found = {
            row: entry for entry in self._entries if entry["stage"] == "validate" for row in entry.get("rows") or []
        }
        return found | self.publisher.failed

    def run(self, free: Sequence[PlannedRow], alone: Sequence[PlannedRow]) -> str | None:
        """Extract ``free`` rows in batches, then ``alone`` ones and those that failed, one by one.

        Returns None when it came to its end, or the text of a crash.
        """
        batches = plan.pack(free, self.job.batch_tokens)
        every = [*batches, *([row] for row in alone)]
        longest = max(row.length for batch in every for row in batch)
        self._to_write = states_bytes(sum(row.length for batch in every for row in batch), self.job.per_token)
        session = Session(self.job.config, self.job.target, self.stage, longest)
        begun, loaded = time.perf_counter(), None
        lone: Sequence[PlannedRow] = ()
        try:
            with session:
                session.attach(self.job.fingerprint, self.job.stored, every)
                self.publisher.start()
                loaded = time.perf_counter()
                self._load_seconds = loaded - begun
                stop = self._stop(session)
                self._feed(session, batches, stop, 2 * self.job.config.engine.max_num_seqs)
                self._blame_refused()
                lone = self.tries.split(plan.missing([*alone, *free], self.publisher.published))[1]
                if lone and not self.stopped:
                    log(f"extract: {len(lone)} rows failed before and are tried again, each alone")
                    for row in lone:
                        self._alone(session, row, stop)
                self._more |= {
                    "method": session.attached["method"], "runner": session.attached["runner"],
                    "async_scheduling": session.attached["async_scheduling"],
                    "startup": {name: round(value, 2) for name, value in session.seconds.items()},
                }  # fmt: skip
                self.publisher.finish()
                self._run_seconds = time.perf_counter() - loaded
                self.progress.show(self.publisher, always=True)
            return None
        except KeyboardInterrupt:
            with contextlib.suppress(Exception):
                self.publisher.finish()
            raise
        except Exception as error:
            crash = self._crash(error, session)
            self._run_seconds = time.perf_counter() - (loaded or time.perf_counter())
            return crash

    def _stop(self, session: Session) -> Callable[[], str | None]:
        def reserve() -> int:
            # Never more than what is left to write: else a store that fits would be stopped near its end.
            begun = held(session.staging)
            return max(0, min(session.buffered_bytes, self._to_write - self.publisher.bytes - begun))

        room = Room(self.job.folder, reserve)

        def stop() -> str | None:
            self.stopped = self.stopped or (self.termination.name if self.termination.asked else room.short())
            return self.stopped

        return stop

    def _feed(self, session: Session, batches: Any, stop: Callable[[], str | None], at_once: int) -> None:
        if not batches:
            return
        self._more["writer"] = session.feed(batches, self.job.tokens, self.publisher, self.progress, stop, at_once)
        self._entries = ledger.read(session.errors)

    def _alone(self, session: Session, row: PlannedRow, stop: Callable[[], str | None]) -> None:
        """Try one row until it is published or has used up its tries."""
        while not self.stopped and not self._settled(row.row_id):
            self._feed(session, [[row]], stop, 1)
            entry = self.failed_rows().get(row.row_id)
            if entry is None:
                return
            if not self.stopped and not self._settled(row.row_id):
                self._blame([row.row_id], entry, certain=True)

    def _settled(self, row: str) -> bool:
        return row in self.publisher.published or row in self.tries.quarantined

    def _blame_refused(self) -> None:
        """Blame the rows that were refused, once a start; of several that were refused together any may be the cause."""
        for row, entry in self.failed_rows().items():
            if row not in self._blamed and not self._settled(row):
                self._blame([row], entry, certain=len(entry["rows"]) == 1)

    def _blame(self, rows: Sequence[str], entry: dict[str, Any], certain: bool) -> None:
        self._blamed.update(rows)
        before = len(self.tries.quarantined)
        self.tries.blame(rows, entry, certain)
        self.newly_quarantined += len(self.tries.quarantined) - before

    def _crash(self, error: Exception, session: Session) -> str:
        # A worker's files may be complete though the engine is not: publish what is right, then tell all that is known.
        try:
            self.publisher.finish()
        except Exception as other:
            log(
                f"extract: publishing what was finished failed as well\n{ledger.text(ledger.describe(other, stage='publish'))}"
            )
        self._entries = ledger.read(session.errors)
        entries = ledger.of_engine(self._entries)
        if session.killed:
            entries.append(session.killed)
        entries.sort(key=lambda entry: entry["time"])
        running = [row.row_id for row in session.running.values()]
        suspected = suspects(entries, running) if session.running else []
        if self.termination.asked:
            # A scheduler signals the engine's processes too: that one of them ended says nothing of any row.
            self.stopped, suspected = self.termination.name, []
        else:
            self._blame_refused()
        own = ledger.describe(error, stage="driver", rows=running or None)
        first = (entries or [own])[0]
        self._blame(suspected, first | {"rows": suspected}, certain=len(running) == 1)
        kept = ledger.keep(
            self.job.folder, [*self._entries, *([session.killed] if session.killed else []), own], suspected
        )
        self.full = is_full(error, self.job.folder)
        return _sentence(
            self.job.folder, self.publisher, first, [*entries, *([] if entries else [own])], kept, self.full
        )


def _sentence(
    folder: Path,
    publisher: Publisher,
    first: dict[str, Any],
    entries: Sequence[dict[str, Any]],
    kept: Path | None,
    full: bool,
) -> str:
    where = " ".join(f"{name} {first[name]}" for name in ("stage", "rank") if first.get(name) is not None)
    text = (
        f"extraction broke off: {first['type']} ({where}); {publisher.batches} batches of this start are in the store"
        f"{f'; all of it is in {kept}' if kept else ''}\n{ledger.cause_last(entries)}"
    )
    if full:
        told = f"{folder}: the disk is full; free some, or name another folder in extract.store, and run the same command again"
        # First, where the view of a run looks, and last, where a person does.
        text = f"{told}\n{text}\n{told}"
    return text
