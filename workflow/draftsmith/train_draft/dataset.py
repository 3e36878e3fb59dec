"""The rows of a split as examples: states from the store, and the slots that count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor
from torch.utils.data import Dataset

from draftsmith.draft.slots import counted_slots
from draftsmith.errors import DraftsmithError
from draftsmith.log import log
from draftsmith.rows import stored_length

if TYPE_CHECKING:
    import pandas as pd


class States(Protocol):
    """States of one row: token_ids int32 [L], aux [L, A, H], final [L, H] (post-norm)."""

    token_ids: Tensor
    aux: Tensor
    final: Tensor


class Source(Protocol):
    """Where the states of a row come from; the store's reader, or a stand-in."""

    def row(self, row: str) -> Any:
        """:class:`States` of the row with this id."""


@dataclass(frozen=True)
class Row:
    """One row as rows.parquet has it: its supervised spans are half open, and a pass takes it ``repeats`` times."""

    row_id: str
    length: int
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    repeats: int = 1


@dataclass(frozen=True)
class Example:
    """A row with its states and counted slots, as :mod:`draftsmith.draft.slots` defines them."""

    row: Row
    states: Any
    slots: Tensor
    depth: Tensor


class RowDataset(Dataset[Example]):
    """Rows by number; states are read when asked for."""

    def __init__(self, rows: list[Row], source: Source, steps: int, supervised_only: bool = False) -> None:
        """``supervised_only`` is the manifest's: the states of a row end with its last supervised token.

        No slot looks at later ones, so slots and loss are those of the whole row.
        """
        self.rows = rows
        self.source = source
        self.steps = steps
        self.supervised_only = supervised_only

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Example:
        row = self.rows[index]
        states = self.source.row(row.row_id)
        expected = stored_length(row.length, row.ends) if self.supervised_only else row.length
        if len(states.token_ids) != expected:
            raise DraftsmithError(
                f"row {row.row_id} has {row.length} tokens in rows.parquet, and {len(states.token_ids)} instead of {expected} "
                "in the store; run extract_shard again"
            )
        return Example(row, states, *counted_slots(row.starts, row.ends, row.length, self.steps))


def usable_rows(table: pd.DataFrame, split: str, manifest: Mapping[str, Any], origin: Path) -> list[Row]:
    """Rows of ``split`` whose states are in the manifest and that have a slot to learn from, in the table's order.

    Rows in the manifest's ``failed`` are left out with a line in the log. A row that is in neither is an error, as is a
    training split that nothing is left of.
    """
    failed = {entry["row_id"] for entry in manifest["failed"]}
    rows, lost, idle = [], 0, 0
    entries: list[dict[str, Any]] = table[table["split"] == split].to_dict("records")  # type: ignore[assignment]
    for entry in entries:
        if entry["row_id"] in failed:
            lost += 1
        elif entry["row_id"] not in manifest["rows"]:
            raise DraftsmithError(
                f"{origin}: row {entry['row_id']} of rows.parquet is not in the manifest; run extract_shard and merge_manifest again"
            )
        else:
            row = Row(
                entry["row_id"],
                int(entry["length"]),
                tuple(int(start) for start in entry["span_starts"]),
                tuple(int(end) for end in entry["span_ends"]),
                int(entry.get("repeats", 1)),
            )
            # A span of one token asks for nothing: the target gives it itself.
            if len(counted_slots(row.starts, row.ends, row.length, 1)[0]):
                rows.append(row)
            else:
                idle += 1
    if lost or idle:
        log(
            f"{split}: {lost} rows without states (failed in extraction) and {idle} with nothing to predict are left out"
        )
    if split == "train" and not rows:
        raise DraftsmithError(
            f"{origin}: no row of the split 'train' is left to learn from; add conversations (data.sources) "
            "or see why their rows were dropped or failed"
        )
    return rows
