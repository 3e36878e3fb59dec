"""Which rows each start of the engine is given, and when there is another start; the engine only writes files or fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from test_recomputes import TARGET, batch_file

from draftsmith import clean_gpus, extract_shard, store
from draftsmith.config import parse
from draftsmith.extract_shard import driver, ledger, session, space
from draftsmith.extract_shard.plan import PlannedRow
from draftsmith.processes import held_engine
from draftsmith.signals import Termination

ROWS = [[number, number + 1, number + 2] for number in range(8)]
IDS = [store.row_id(row) for row in ROWS]
PER_TOKEN = 64


@dataclass
class Engine:
    """Stands in for sessions. ``refused`` gives how often a row's states are no number, ``crashes`` the (start, batch) that breaks."""

    job: driver.Job
    refused: Counter[str] = field(default_factory=Counter)
    crashes: set[tuple[int, int]] = field(default_factory=set)
    asked: list[list[list[str]]] = field(default_factory=list)
    """Rows of each batch of each start."""
    before_crash: Callable[[], None] = lambda: None

    def tries(self, row: str) -> int:
        return sum(row in batch for start in self.asked for batch in start)

    def session(self, config: Any, target: Any, staging: Path, longest: int) -> FakeSession:
        self.asked.append([])
        return FakeSession(self, staging)


class FakeSession:
    def __init__(self, engine: Engine, staging: Path) -> None:
        self.engine, self.staging, self.errors = engine, staging, staging / "errors"
        self.running: dict[str, PlannedRow] = {}
        self.attached = {"method": "none", "runner": "none", "async_scheduling": False}
        self.seconds: dict[str, float] = {}
        self.buffered_bytes, self.killed = 1 << 40, None

    def __enter__(self) -> FakeSession:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def attach(self, *_: Any) -> None:
        pass

    def feed(self, batches: Any, tokens: Any, publisher: Any, progress: Any, stop: Any, at_once: int) -> dict[str, Any]:
        asked = self.engine.asked[-1]
        for batch in batches:
            if stop():
                break
            asked.append([row.row_id for row in batch])
            self.running = {row.row_id: row for row in batch}
            if (len(self.engine.asked), len(asked)) in self.engine.crashes:
                self.engine.before_crash()
                raise RuntimeError("EngineCore encountered an issue")
            for row in batch:
                if self.engine.refused[row.row_id] > 0:
                    self.engine.refused[row.row_id] -= 1
                    ledger.record(self.errors, ValueError("NaN"), rank=0, stage="validate", rows=[row.row_id])
                else:
                    batch_file(self.engine.job, row, self.staging)
            self.running = {}
            publisher.settle()
        return {}


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """An engine for eight rows, two a batch, with these keys of `extract`."""

    def make(**keys: Any) -> Engine:
        settings: dict[str, Any] = {"extract": keys, "engine": {"args": {"load_format": "dummy"}}}
        rows = [PlannedRow(row, 3) for row in IDS]
        target = TARGET | {"layers": [1, 3, 5], "path": str(tmp_path)}
        tokens = dict(zip(IDS, ROWS, strict=True))
        folder = tmp_path / "store"
        folder.mkdir()
        stored = ("float32", "plain")
        made = Engine(
            driver.Job(parse(settings, "test"), target, folder, "key", stored, rows, 6, PER_TOKEN, tokens, "1-of-1")
        )
        monkeypatch.setattr(driver, "Session", made.session)
        return made

    monkeypatch.setattr(driver.engine, "prepare_environment", lambda *_: None)
    monkeypatch.setattr(clean_gpus, "check", lambda *_: None)
    return make


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_a_row_whose_states_are_no_number_is_tried_as_often_as_asked(engine: Callable[..., Engine], limit: int) -> None:
    made = engine(max_tries=limit)
    made.refused[IDS[3]] = 99
    outcome = driver.extract(made.job, Termination())
    assert list(outcome.failed) == [IDS[3]]
    assert made.tries(IDS[3]) == limit
    assert made.asked[0][4:] == [[IDS[3]]] * (limit - 1)
    assert outcome.figures["batches"] == 7


def test_a_row_that_comes_right_is_left_alone(engine: Callable[..., Engine]) -> None:
    made = engine(max_tries=5)
    made.refused[IDS[3]] = 2
    assert driver.extract(made.job, Termination()).failed == {}
    assert made.tries(IDS[3]) == 3


def test_a_refused_row_is_blamed_when_the_engine_crashes_later(engine: Callable[..., Engine]) -> None:
    """The next start leaves it for the end, as those of the step that broke, and does not meet it as if for the first time."""
    made = engine(max_tries=2)
    made.refused[IDS[0]], made.crashes = 99, {(1, 3)}
    outcome = driver.extract(made.job, Termination())
    assert made.asked[1] == [IDS[6:8], [IDS[0]], [IDS[4]], [IDS[5]]]
    assert list(outcome.failed) == [IDS[0]]
    assert outcome.figures["starts"] == 2
    (kept,) = (made.job.folder / ".ledger").glob("*.json")
    assert ledger.suspects_in(kept) == IDS[4:6]


def test_an_engine_that_ends_with_the_job_is_not_started_again(
    engine: Callable[..., Engine], capfd: pytest.CaptureFixture[str]
) -> None:
    """A scheduler's SIGTERM to all processes: no row is to blame, and what is published stays."""
    made, termination = engine(), Termination()
    made.crashes = {(1, 3)}
    made.before_crash = lambda: setattr(termination, "asked", True)
    outcome = driver.extract(made.job, termination)
    assert (outcome.stopped, outcome.failed, len(made.asked)) == ("SIGTERM", {}, 1)
    assert len(list(made.job.folder.glob(f"*{store.SUFFIX}"))) == 4
    (kept,) = (made.job.folder / ".ledger").glob("*.json")
    assert ledger.suspects_in(kept) == []
    assert "EngineCore encountered an issue" in capfd.readouterr().err
    with pytest.raises(SystemExit) as ended:
        extract_shard._stopped(outcome, termination)
    assert ended.value.code == 143


def test_no_engine_is_started_once_the_end_was_asked_for(engine: Callable[..., Engine]) -> None:
    made, termination = engine(), Termination()
    termination.asked = True
    assert driver.extract(made.job, termination).stopped == "SIGTERM"
    assert made.asked == []


def test_a_later_start_reserves_room_for_what_is_missing_alone(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a store that fits would be stopped near its end."""
    looks: list[int] = []

    class Room:
        def __init__(self, folder: Path, reserve: Callable[[], int]) -> None:
            self.reserve = reserve

        def short(self) -> None:
            looks.append(self.reserve())

    monkeypatch.setattr(driver, "Room", Room)
    made = engine()
    made.crashes = {(1, 3)}
    driver.extract(made.job, Termination())
    first, second = looks[0], looks[3]
    assert first == space.states_bytes(8 * 3, PER_TOKEN)
    assert second == space.states_bytes(4 * 3, PER_TOKEN)


def test_the_engine_is_let_go_before_it_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM ends its core by SIGTERM, which a held core would pass over."""
    made = session.Session(parse({}, "test"), {}, tmp_path, 1)
    held: list[bool] = []

    class Core:
        def shutdown(self) -> None:
            held.append((tmp_path / "at-work").exists())

    monkeypatch.setattr(session.psutil.Process, "children", lambda *_, **__: [])
    monkeypatch.setattr(session.leftovers, "forget", lambda: None)
    held_engine.hold(tmp_path)
    assert (tmp_path / "at-work").exists()
    made.llm = type("LLM", (), {"llm_engine": type("Inner", (), {"engine_core": Core()})})
    made._end()
    assert held == [False]
