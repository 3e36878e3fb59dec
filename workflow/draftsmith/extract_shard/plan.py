"""Which rows a shard is answerable for, and how those that are missing are packed into batches.

The share of a shard follows from the rows alone, never from what the store holds, so that shards that start at different
times share nothing. What is already in the store is then left out, wherever and by whichever shard it was computed.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftsmith import store
from draftsmith.errors import DraftsmithError
from draftsmith.rows import read_rows, stored_length

_FILE_BYTES = 128 << 20
_MOST_TOKENS = 8192
IN_WRITING = 12
"""Batches that may be waiting for the disk, each in a buffer of its own."""


@dataclass(frozen=True)
class PlannedRow:
    """A row to extract: its id and its length in tokens."""

    row_id: str
    length: int


def batch_tokens(asked: int | None, bytes_per_token: int) -> int:
    """Tokens of a batch: as asked, or what makes a file of about :data:`_FILE_BYTES`.

    A file is written by one thread, so small files let all of them share the end of a run.
    """
    return asked or max(512, min(_MOST_TOKENS, _FILE_BYTES // bytes_per_token))


def buffers(step_tokens: int, batch_tokens: int, batches: int) -> int:
    """Buffers of a batch each that the engine's process holds, for steps of ``step_tokens`` and ``batches`` of at most ``batch_tokens``.

    What a step brings is open until its end; one more batch has begun, and one is about to.
    """
    return min(IN_WRITING + step_tokens // batch_tokens + 2, batches)


def pack(rows: Sequence[PlannedRow], batch_tokens: int) -> list[list[PlannedRow]]:
    """Cut ``rows``, in order, into batches of at most ``batch_tokens`` tokens; a longer row is a batch of its own."""
    batches: list[list[PlannedRow]] = []
    room = 0
    for row in rows:
        if not batches or row.length > room:
            batches.append([])
            room = batch_tokens
        batches[-1].append(row)
        room -= row.length
    return batches


def parse_scatteritem(scatteritem: str) -> tuple[int, int]:
    """Snakemake's ``2-of-8`` as (index from 0, count)."""
    try:
        place, count = (int(part) for part in scatteritem.split("-of-"))
    except ValueError:
        place, count = 0, 0
    if not 1 <= place <= count:
        raise DraftsmithError(f"--scatteritem {scatteritem}: write it as 1-of-1, 2-of-8 …")
    return place - 1, count


def share(rows: Sequence[PlannedRow], scatteritem: str, batch_tokens: int) -> list[PlannedRow]:
    """Rows of one shard: every n-th pack of all rows, so that the shards get about the same number of tokens.

    A row that is there more than once counts as the first of its copies, so that it belongs to one shard and is computed once.
    """
    place, count = parse_scatteritem(scatteritem)
    distinct = list({row.row_id: row for row in rows}.values())
    return [row for group in pack(distinct, batch_tokens)[place::count] for row in group]


def missing(rows: Sequence[PlannedRow], present: Container[str]) -> list[PlannedRow]:
    """Rows that the store does not hold yet."""
    return [row for row in rows if row.row_id not in present]


def stored_rows(rows: Path, supervised_only: bool) -> dict[str, PlannedRow]:
    """The row that the store holds for each row of rows.parquet, by its row_id and in the file's order.

    With ``supervised_only`` that is the row cut by :func:`draftsmith.rows.stored_length`, the first tokens of the whole one. As a target
    looks at earlier tokens alone, its states are those of the whole row. A cut row is a row like any other, with the hash of
    its own tokens as its id, so that two rows may have the same one.
    """
    if not supervised_only:
        table = read_rows(rows, ["row_id", "length"])
        return {row: PlannedRow(row, int(length)) for row, length in zip(table["row_id"], table["length"], strict=True)}
    table = read_rows(rows, ["row_id", "length", "span_ends", "input_ids"])
    found: dict[str, PlannedRow] = {}
    columns = (table[name] for name in ("row_id", "length", "span_ends", "input_ids"))
    for row, length, ends, ids in zip(*columns, strict=True):
        left = stored_length(int(length), ends)
        found[row] = PlannedRow(row if left == length else store.row_id(ids[:left]), left)
    return found
