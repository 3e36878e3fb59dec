"""tokenize after an earlier run: only conversations that are new are made, and what comes out is as if all had been."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import chats
from draftsmith.tokenize import row_cache, row_pool
from draftsmith.tokenize.make_rows import RowMaker
from tokenize_bench import Bench, conversation, many

ROWS = many(40, domain="x")
NEW = conversation("something new", "The answer", id="new")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """After a first run on ROWS."""
    made = Bench(tmp_path)
    made.workdir = tmp_path / "work"
    # One new row is no work for other processes.
    monkeypatch.setattr(row_pool, "ProcessPoolExecutor", None)
    report = made.run(ROWS)
    assert (report["made"], report["reused"]) == (40, 0)
    return made


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """First messages of the conversations that rows are made of."""
    found: list[str] = []
    make = RowMaker.make
    monkeypatch.setattr(
        RowMaker, "make", lambda self, given: found.append(given.messages[0]["content"]) or make(self, given)
    )
    return found


def alone(bench: Bench, rows: list[dict[str, Any]], folder: Path, **settings: Any) -> pd.DataFrame:
    """What a first run makes of ``rows``."""
    other = Bench(folder)
    other.data = bench.data
    other.run(rows, **settings)
    return other.rows


def test_nothing_new(bench: Bench, made: list[str]) -> None:
    before = bench.rows
    report = bench.run(ROWS)
    assert (report["made"], report["reused"], made) == (0, 40, [])
    pd.testing.assert_frame_equal(bench.rows, before)


@pytest.mark.parametrize("place", [0, 20, 40])
def test_a_row_is_put_in(bench: Bench, made: list[str], tmp_path: Path, place: int) -> None:
    rows = [*ROWS[:place], NEW, *ROWS[place:]]
    report = bench.run(rows)
    assert made == ["something new"]
    assert (report["made"], report["reused"]) == (1, 40)
    pd.testing.assert_frame_equal(bench.rows, alone(bench, rows, tmp_path / "alone"))


def test_a_row_is_edited(bench: Bench, made: list[str], tmp_path: Path) -> None:
    rows = [*ROWS[:7], conversation("what is 7", "something else", id="c7", domain="x"), *ROWS[8:]]
    report = bench.run(rows)
    assert made == ["what is 7"]
    assert (report["made"], report["reused"]) == (1, 39)
    pd.testing.assert_frame_equal(bench.rows, alone(bench, rows, tmp_path / "alone"))
    # And back again: the former row is still known.
    assert bench.run(ROWS)["made"] == 0


def test_rows_in_another_order_with_other_names(bench: Bench, made: list[str], tmp_path: Path) -> None:
    rows = [row | {"id": f"renamed {row['id']}", "domain": "y"} for row in ROWS[::-1]]
    assert bench.run(rows)["made"] == 0
    assert made == []
    pd.testing.assert_frame_equal(bench.rows, alone(bench, rows, tmp_path / "alone"))
    assert set(bench.rows.domain) == {"y"}


def test_what_only_changes_the_split(bench: Bench, made: list[str]) -> None:
    report = bench.run(ROWS, seed=5, validation_fraction=0.3, evaluation_per_domain=2)
    assert (report["made"], report["by_split"]["evaluation"]) == (0, 2)
    assert made == []


@pytest.mark.parametrize("settings", [{"max_length": 20}, {"min_supervised_tokens": 6}, {"template_args": {"a": 1}}])
def test_settings_that_change_rows(bench: Bench, settings: dict[str, Any], tmp_path: Path) -> None:
    assert bench.run(ROWS, **settings)["made"] == 40
    pd.testing.assert_frame_equal(bench.rows, alone(bench, ROWS, tmp_path / "alone", **settings))
    # What was made before is still there.
    assert bench.run(ROWS)["made"] == 0


def test_another_template(bench: Bench) -> None:
    bench.tokenizer.chat_template = chats.CHATML.replace("{{ m.role }}\n", "{{ m.role }}: ")
    bench.tokenizer.save_pretrained(bench.folder / "model")
    before = set(bench.rows.row_id)
    assert bench.run(ROWS)["made"] == 40
    assert not before & set(bench.rows.row_id)


def test_what_was_dropped_is_known_too(bench: Bench, made: list[str]) -> None:
    rows = [*ROWS, conversation("hi"), conversation("q", ""), conversation("z" * 600, "a")]
    first, second = bench.run(rows), bench.run(rows)
    assert first["dropped"] == second["dropped"] == {"no_answer": 1, "empty_answer": 1, "too_long": 1}
    assert first["dropped_examples"] == second["dropped_examples"]
    assert (second["made"], len(made)) == (0, 3)


def test_the_reports_are_the_same(bench: Bench) -> None:
    first = bench.run([NEW, *ROWS])
    second = bench.run([NEW, *ROWS])
    differing = {name for name in first if first[name] != second[name]}
    assert differing == {"made", "reused"}


def test_a_damaged_part(bench: Bench, made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a few conversations each, of which one is damaged: those of it are made again, and no others."""
    monkeypatch.setattr(row_cache, "_PART_BYTES", 1)
    bench.run(ROWS, max_length=100)
    assert bench.workdir is not None
    parts = [
        part for folder in bench.workdir.iterdir() for part in folder.iterdir() if len(list(folder.iterdir())) == 40
    ]
    assert len(parts) == 40
    parts[3].write_bytes(parts[3].read_bytes()[:-8])
    made.clear()
    report = bench.run(ROWS, max_length=100)
    assert (report["made"], report["reused"], len(made)) == (1, 39, 1)


def test_without_a_folder_nothing_is_kept(bench: Bench) -> None:
    bench.workdir = None
    report = bench.run(ROWS)
    assert (report["made"], report["reused"]) == (40, 0)


def test_rows_given_as_tokens_are_not_kept(bench: Bench) -> None:
    assert bench.workdir is not None
    tokens = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1], "id": "t"}
    files = sorted(bench.workdir.rglob("*"))
    for _ in range(2):
        report = bench.run([*ROWS, tokens])
        assert (report["made"], report["reused"]) == (1, 40)
    assert sorted(bench.workdir.rglob("*")) == files
    assert list(bench.rows.input_ids.iloc[-1]) == [5, 6, 7, 8]
