"""Which rows are suspected after a crash, and when one is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftsmith.extract_shard import ledger
from draftsmith.extract_shard.plan import PlannedRow
from draftsmith.extract_shard.tries import Tries, remembered, suspects

ROWS = [PlannedRow(name, 10) for name in "abcd"]
ENTRY: dict[str, Any] = {"type": "RuntimeError", "message": "", "traceback": ""}


def names(rows: list[PlannedRow]) -> str:
    return "".join(row.row_id for row in rows)


def test_a_row_among_others_is_tried_alone_and_then_left_out() -> None:
    tries = Tries(limit=2)
    tries.blame(["b", "c"], ENTRY, certain=False)
    free, alone = tries.split(ROWS)
    assert (names(free), names(alone)) == ("ad", "bc")
    tries.blame(["c"], ENTRY, certain=True)
    free, alone = tries.split(ROWS)
    assert (names(free), names(alone)) == ("ad", "b")
    assert list(tries.quarantined) == ["c"]


def test_no_row_is_left_out_for_what_happened_among_others() -> None:
    """However often: only a row that was alone is known to be guilty."""
    tries = Tries(limit=2)
    for _ in range(5):
        tries.blame(["b"], ENTRY, certain=False)
    assert tries.quarantined == {}


def test_more_tries_are_given_when_asked() -> None:
    tries = Tries(limit=4)
    tries.blame(["b"], ENTRY, certain=False)
    for left_out in ([], [], ["b"]):
        tries.blame(["b"], ENTRY, certain=True)
        assert list(tries.quarantined) == left_out


def test_a_single_try_is_enough_when_the_cause_is_certain() -> None:
    tries = Tries(limit=1)
    tries.blame(["b"], ENTRY, certain=False)
    tries.blame(["c"], ENTRY, certain=True)
    assert list(tries.quarantined) == ["c"]


def test_the_rows_of_the_first_step_that_failed_are_suspected() -> None:
    entries = [
        {"type": "OSError", "stage": "load", "rows": None},
        {"type": "RuntimeError", "stage": "step", "rows": ["b"]},
        {"type": "RuntimeError", "stage": "step", "rows": ["b", "c"]},
    ]
    assert suspects(entries, ["a", "b"]) == ["b"]
    assert suspects([], ["a", "b"]) == ["a", "b"]


def test_no_row_is_suspected_when_the_model_cannot_be_read() -> None:
    assert suspects([{"type": "Unreadable", "stage": "step", "rows": ["b"]}], ["a", "b"]) == []


def test_suspects_of_earlier_runs_are_remembered(tmp_path: Path) -> None:
    ledger.keep(tmp_path, [ENTRY], ["a"])
    ledger.keep(tmp_path, [ENTRY], ["c", "a"])
    (tmp_path / ".ledger" / "half.json").write_text('{"suspects": ["d"')
    assert remembered(tmp_path) == {"a", "c"}
    free, alone = Tries(2, remembered(tmp_path)).split(ROWS)
    assert (names(free), names(alone)) == ("bd", "ac")
