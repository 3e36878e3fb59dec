"""Token rows in columns: how they wait for their split, and how they are written.

Token ids go from numpy arrays to Arrow and from there to the file without ever being Python numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

import numpy as np

GROUP_ROWS = 1024
"""Rows of a batch of the spool and of a row group of rows.parquet."""


class Spool:
    """Rows in ``file``, of columns ``schema`` (Arrow's): first written one by one, then read back once in order."""

    def __init__(self, file: IO[bytes], schema: Any) -> None:
        import pyarrow as pa

        self._file, self._schema = file, schema
        self._writer = pa.ipc.new_stream(file, schema, options=pa.ipc.IpcWriteOptions(compression="lz4"))
        self._waiting: list[Mapping[str, Any]] = []

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row."""
        self._waiting.append(row)
        if len(self._waiting) >= GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write_batch(columns(self._waiting, self._schema))
            self._waiting = []

    def close(self) -> None:
        """Write what is left; no row can be added any more."""
        self._flush()
        self._writer.close()

    def batches(self) -> Iterator[Any]:
        """The rows in order, as record batches."""
        import pyarrow as pa

        self._file.seek(0)
        with pa.ipc.open_stream(self._file) as reader:
            yield from reader


def columns(rows: Sequence[Mapping[str, Any]], schema: Any) -> Any:
    """A record batch of ``rows``; columns of lists hold int32 and take anything that numpy makes an array of."""
    import pyarrow as pa

    made = []
    for field in schema:
        values = [row[field.name] for row in rows]
        if pa.types.is_list(field.type):
            parts = [np.asarray(value, dtype=np.int32) for value in values]
            offsets = np.zeros(len(parts) + 1, dtype=np.int32)
            np.cumsum([len(part) for part in parts], out=offsets[1:])
            flat = np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
            made.append(pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat), type=field.type))
        else:
            made.append(pa.array(values, type=field.type))
    return pa.record_batch(made, schema=schema)


def small_columns(batch: Any) -> list[dict[str, Any]]:
    """The rows of ``batch`` without their columns of lists."""
    import pyarrow as pa

    names = [field.name for field in batch.schema if not pa.types.is_list(field.type)]
    return list(batch.select(names).to_pylist())


def with_columns(batch: Any, rows: Sequence[Mapping[str, Any] | None], schema: Any) -> Any:
    """The rows of ``batch`` that are not None in ``rows``: lists as they are in the batch, other columns as in ``rows``."""
    import pyarrow as pa

    kept = [row for row in rows if row is not None]
    lists = batch.filter(pa.array([row is not None for row in rows]))
    made = [
        lists.column(field.name)
        if pa.types.is_list(field.type)
        else pa.array([row[field.name] for row in kept], type=field.type)
        for field in schema
    ]
    return pa.record_batch(made, schema=schema)
