"""What the store holds of a row: all of it, or what is left when it ends with its last supervised token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from draftsmith import store
from draftsmith.extract_shard.plan import PlannedRow, stored_rows
from draftsmith.rows import stored_length

# Tokens, and where the answers end.
ROWS = [([5, 6, 7, 8], [2, 4]), ([5, 6, 7, 9], [1, 3]), ([5, 6, 7, 8, 1], [3]), ([4, 4], [1]), ([3, 2, 1], [])]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    table = {
        "row_id": [store.row_id(ids) for ids, _ in ROWS],
        "length": [len(ids) for ids, _ in ROWS],
        "input_ids": [np.array(ids, dtype=np.int32) for ids, _ in ROWS],
        "span_ends": [np.array(ends, dtype=np.int32) for _, ends in ROWS],
    }
    pd.DataFrame(table).to_parquet(tmp_path / "rows.parquet")
    return tmp_path / "rows.parquet"


@pytest.mark.parametrize(
    ("length", "ends", "left"), [(9, [9], 9), (9, [3, 7], 7), (9, [7, 3], 7), (9, [], 9), (9, [12], 9)]
)
def test_stored_length(length: int, ends: list[int], left: int) -> None:
    assert stored_length(length, ends) == left
    assert stored_length(length, np.array(ends, dtype=np.int32)) == left


def test_whole_rows_are_stored_as_they_are(rows: Path) -> None:
    found = stored_rows(rows, supervised_only=False)
    assert list(found.items()) == [(store.row_id(ids), PlannedRow(store.row_id(ids), len(ids))) for ids, _ in ROWS]


def test_rows_are_cut_after_their_last_supervised_token(rows: Path) -> None:
    """The first and the last stay as they are; the second and the third differ in their tails alone, so one stored row is both's."""
    found = stored_rows(rows, supervised_only=True)
    left = [[5, 6, 7, 8], [5, 6, 7], [5, 6, 7], [4], [3, 2, 1]]
    assert list(found.items()) == [
        (store.row_id(ids), PlannedRow(store.row_id(kept), len(kept)))
        for (ids, _), kept in zip(ROWS, left, strict=True)
    ]
    assert len(set(found.values())) == 4


def test_only_a_cut_needs_the_tokens(tmp_path: Path) -> None:
    """Lists of rows without them, as some tests and tools have, are enough for whole rows."""
    pd.DataFrame({"row_id": ["a"], "length": [3]}).to_parquet(tmp_path / "rows.parquet")
    assert stored_rows(tmp_path / "rows.parquet", supervised_only=False) == {"a": PlannedRow("a", 3)}
