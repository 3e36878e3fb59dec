"""Random access to stored rows, without copying: a row is a view onto a mapped file (float8 is turned back when read)."""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.store.format import (
    StoreError,
    checksum,
    dequantise,
    read_header,
    row_id,
    row_parts,
    tensors,
)

if TYPE_CHECKING:
    from torch import Tensor

_AGAIN = "snakemake with `--forcerun extract_shard` computes its rows again"


@dataclass(frozen=True)
class Row:
    """Hidden states of one row of L tokens: views onto the file, not to be written to."""

    token_ids: Tensor  # int32 [L]
    aux: Tensor  # [L, A, H]
    final: Tensor  # [L, H]


class BatchFile:
    """A batch file mapped into memory."""

    def __init__(self, path: Path) -> None:
        import torch

        self.path = path
        self.header, places = read_header(path)
        with open(path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        view = memoryview(self._map)

        def part(at: int, size: int) -> Tensor:
            # A writable flag would need a private copy; the views are read-only by agreement.
            return torch.frombuffer(view[at : at + size], dtype=torch.uint8)

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            self._views = tensors(self.header, places, part)
        self.offsets: list[int] = self._views["offsets"].tolist()
        self._dtype = getattr(torch, self.header.dtype)
        self.verified: set[int] = set()

    def row(self, place: int) -> Row:
        """The row at ``place``; its checksum is compared the first time.

        Raises :class:`StoreError` when it differs.
        """
        views, part = self._views, slice(self.offsets[place], self.offsets[place + 1])
        token_ids = views["token_ids"][part]
        if place not in self.verified:
            same = checksum(*row_parts(views, part)) == self.header.checksums[place]
            if not same or row_id(token_ids.numpy()) != self.header.rows[place]:
                raise StoreError(
                    f"{self.path}: the states of row {self.header.rows[place]} do not have their checksum; "
                    f"delete the file; {_AGAIN}"
                )
            self.verified.add(place)
        aux, final = views["aux"][part], views["final"][part]
        if self.header.storage == "fp8":
            aux = dequantise(aux, views["aux_scale"][part], self._dtype)
            final = dequantise(final, views["final_scale"][part], self._dtype)
        return Row(token_ids, aux, final)


def open_batch(path: Path) -> BatchFile:
    """Map a batch file; ``row(place)`` then gives its rows, checked."""
    return BatchFile(path)


class StoreReader:
    """The rows of a manifest."""

    def __init__(self, folder: Path, rows: dict[str, Sequence[Any]]) -> None:
        """``rows`` maps a row id to (file name, place in the file), as manifest.json has it."""
        self.folder = folder
        self.rows = rows
        self._files: dict[str, BatchFile] = {}

    def row(self, row: str) -> Row:
        """States of one row.

        Raises :class:`StoreError` when the row is not in the manifest, or its file is missing or damaged.
        """
        try:
            name, place = self.rows[row]
        except KeyError:
            raise StoreError(f"{self.folder}: row {row} is not in the manifest; run extract_shard again") from None
        if name not in self._files:
            try:
                self._files[name] = BatchFile(self.folder / name)
            except StoreError as error:
                raise StoreError(f"{error}, though the manifest names it; {_AGAIN}") from error
        return self._files[name].row(int(place))

    def __getstate__(self) -> dict[str, Any]:
        # A worker process of a DataLoader maps the files anew.
        return {"folder": self.folder, "rows": self.rows, "_files": {}}
