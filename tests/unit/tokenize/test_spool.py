"""Rows in columns, from records to batches and back."""

from __future__ import annotations

import io

import numpy as np
import pyarrow as pa
import pytest

from draftsmith.tokenize import spool
from draftsmith.tokenize.spool import Spool, columns, small_columns, with_columns

SCHEMA = pa.schema([("name", pa.string()), ("ids", pa.list_(pa.int32())), ("size", pa.int32())])


def record(number: int) -> dict[str, object]:
    ids = np.arange(number, dtype=np.int32) if number % 2 else list(range(number))
    return {"name": f"r{number}", "ids": ids, "size": number, "more": "is left out"}


def test_rows_come_back_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "GROUP_ROWS", 3)
    rows = Spool(io.BytesIO(), SCHEMA)
    for number in range(7):
        rows.add(record(number))
    rows.close()
    batches = list(rows.batches())
    assert [batch.num_rows for batch in batches] == [3, 3, 1]
    assert all(batch.schema == SCHEMA for batch in batches)
    assert [row for batch in batches for row in batch.to_pylist()] == [
        {"name": f"r{number}", "ids": list(range(number)), "size": number} for number in range(7)
    ]


def test_no_rows() -> None:
    rows = Spool(io.BytesIO(), SCHEMA)
    rows.close()
    assert list(rows.batches()) == []


def test_columns_of_other_numbers_are_int32() -> None:
    batch = columns([{"name": "a", "ids": np.array([1, 2], dtype=np.int64), "size": 2}], SCHEMA)
    assert batch.column("ids").type == pa.list_(pa.int32())
    assert batch.to_pylist() == [{"name": "a", "ids": [1, 2], "size": 2}]


def test_some_rows_with_other_small_columns() -> None:
    batch = columns([record(number) for number in range(4)], SCHEMA)
    rows = small_columns(batch)
    assert rows == [{"name": f"r{number}", "size": number} for number in range(4)]
    schema = pa.schema([("ids", pa.list_(pa.int32())), ("split", pa.string()), ("size", pa.int32())])
    kept = [row | {"split": "train", "size": 10 * row["size"]} if row["size"] != 1 else None for row in rows]
    assert with_columns(batch, kept, schema).to_pylist() == [
        {"ids": list(range(number)), "split": "train", "size": 10 * number} for number in (0, 2, 3)
    ]
