"""Columns of rows.parquet, and of the spool that it is made from."""

from __future__ import annotations

from typing import Any


def schema(*, spool: bool = False) -> Any:
    """The arrow schema of rows.parquet, or of the ``spool``, which does not know the split yet.

    ``repeats`` is how often a pass of training takes the row, ``cut`` whether it was longer than ``tokenize.max_length``.
    """
    import pyarrow as pa

    texts = ["row_id", "conversation_id", "source", "domain", "prompt_key" if spool else "split"]
    numbers = ["length", "supervised", "repeats", *(["number", "source_index", "saved"] if spool else [])]
    return pa.schema([
        *((name, pa.string()) for name in texts),
        *((name, pa.list_(pa.int32())) for name in ("input_ids", "span_starts", "span_ends")),
        *((name, pa.int32()) for name in numbers),
        ("cut", pa.bool_()),
    ])  # fmt: skip
