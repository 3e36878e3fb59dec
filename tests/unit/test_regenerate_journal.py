"""Part files and the ledger beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftsmith.errors import DraftsmithError
from draftsmith.regenerate.journal import Journal, Ledger


def test_parts_are_found_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.add([])
    journal.add([{"key": "a", "text": "ü"}, {"key": "b"}])
    journal.add([{"key": "c"}])
    again = Journal(tmp_path / "j")
    assert len(again) == 3
    assert again.get("a") == {"key": "a", "text": "ü"}
    assert again.get("c") == {"key": "c"}
    assert "d" not in again
    # What was being written when the power failed has another name and is not read.
    (tmp_path / "j" / ".part-x.jsonl.1234.tmp").write_text('{"key": "d"')
    assert len(Journal(tmp_path / "j")) == 3


def test_of_two_runs_at_once_the_earlier_answer_counts_for_both(tmp_path: Path) -> None:
    one, two = Journal(tmp_path), Journal(tmp_path)
    one.add([{"key": "a", "by": 1}])
    two.add([{"key": "a", "by": 2}, {"key": "b", "by": 2}])
    one.add([{"key": "b", "by": 1}])
    again = Journal(tmp_path)
    assert [again.get(key)["by"] for key in "ab"] == [1, 2]
    assert len(list(tmp_path.iterdir())) == 3


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    Journal(tmp_path).add([{"key": "a"}])
    (part,) = tmp_path.iterdir()
    part.write_text('{"key": "a"}\n{"key"\n')
    with pytest.raises(DraftsmithError, match=rf"{part.name}, line 2: damaged .*delete the file"):
        Journal(tmp_path)


def test_the_ledger_is_made_with_the_first_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger(tmp_path)
    ledger.show()
    assert (list(tmp_path.iterdir()), capsys.readouterr().err) == ([], "")
    entry = {"conversation_id": "c", "turn": 2, "error": "E: why", "traceback": "Traceback…\nE: why\n"}
    ledger.add(entry)
    ledger.add(entry | {"conversation_id": "d"})
    assert [json.loads(line)["conversation_id"] for line in ledger.path.read_text().splitlines()] == ["c", "d"]
    ledger.show()
    shown = capsys.readouterr().err
    assert "2 conversations failed" in shown
    assert str(ledger.path) in shown
    assert "d, turn 2: E: why\nTraceback…" in shown
    # Parts alone are read as answers.
    assert len(Journal(tmp_path)) == 0
