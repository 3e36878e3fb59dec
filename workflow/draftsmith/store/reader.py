"""Random access to stored rows, without copying: a row is a view onto a mapped file (float8 is turned back when read)."""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.store.float8 import dequantise
from draftsmith.store.format import AGAIN, DamagedFile, StoreError, UnreadableFile, checksum, row_id, row_parts, tensors
from draftsmith.store.head import check_belongs, open_file, read_head, unreadable
from draftsmith.store.verification import DAMAGED, examine, move_aside

if TYPE_CHECKING:
    from torch import Tensor

# Files mapped at once: Linux allows a process 65530 maps, and a store of many terabytes has more files.
_MAPS = 8192


@dataclass(frozen=True)
class Row:
    """Hidden states of one row of L tokens: views onto the file, not to be written to."""

    token_ids: Tensor  # int32 [L]
    aux: Tensor  # [L, A, H]
    final: Tensor  # [L, H]


class BatchFile:
    """A batch file mapped into memory; its head is checked, a row when it is first read."""

    def __init__(self, path: Path) -> None:
        """Raises :class:`StoreError` as :func:`draftsmith.store.read_header` does, :class:`FileNotFoundError` when it is gone."""
        import torch

        self.path = path
        # The head and the map are of one file, though another may take its name between them.
        with open_file(path) as file:
            self.header, places = read_head(file, path)
            try:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except OSError as error:
                raise unreadable(path, error) from error
        view = memoryview(self._map)

        def part(at: int, size: int) -> Tensor:
            # A writable flag would need a private copy; the views are read-only by agreement.
            return torch.frombuffer(view[at : at + size], dtype=torch.uint8)

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            self._views = tensors(self.header, places, part)
        self.offsets = list(accumulate(self.header.lengths, initial=0))
        if self._views["offsets"].tolist() != self.offsets:
            raise DamagedFile(f"{path}: its offsets do not follow from the lengths of its rows")
        self._dtype = getattr(torch, self.header.dtype)
        self.verified: set[int] = set()

    def _part(self, place: int) -> slice:
        return slice(self.offsets[place], self.offsets[place + 1])

    def token_ids(self, place: int) -> Tensor:
        """Token ids of the row at ``place``, int32 [L], as the engine saw them; not compared with the row's id."""
        return self._views["token_ids"][self._part(place)]

    def last_state(self, place: int) -> Tensor:
        """Final state [H] of the last token of the row at ``place``; not compared with the checksum."""
        last = self.offsets[place + 1] - 1
        state = self._views["final"][last]
        if self.header.storage == "fp8":
            return dequantise(state, self._views["final_scale"][last], self._dtype)
        return state

    def row(self, place: int) -> Row:
        """The row at ``place``; its token ids and its checksum are compared the first time.

        Raises :class:`DamagedFile` when one of them differs.
        """
        views, part = self._views, self._part(place)
        if place not in self.verified:
            row = self.header.rows[place]
            if row_id(views["token_ids"][part].numpy()) != row:
                raise DamagedFile(f"{self.path}: the token ids of row {row} are not its own")
            if checksum(*row_parts(views, part)) != self.header.checksums[place]:
                raise DamagedFile(f"{self.path}: the states of row {row} do not have their checksum")
            self.verified.add(place)
        aux, final = views["aux"][part], views["final"][part]
        if self.header.storage == "fp8":
            aux = dequantise(aux, views["aux_scale"][part], self._dtype)
            final = dequantise(final, views["final_scale"][part], self._dtype)
        return Row(views["token_ids"][part], aux, final)


def open_batch(path: Path) -> BatchFile:
    """Map a batch file; ``row(place)`` then gives its rows, checked."""
    return BatchFile(path)


class StoreReader:
    """The rows of a manifest. A damaged file is moved aside when it is met, so that the next extraction computes its rows."""

    def __init__(self, folder: Path, rows: dict[str, Sequence[Any]], key: str | None = None) -> None:
        """``rows`` maps a row id to (file name, place in the file), as manifest.json has it, and ``key`` is its fingerprint."""
        self.folder, self.rows, self.key = folder, rows, key
        self._file = lru_cache(_MAPS)(self._open)

    def row(self, row: str) -> Row:
        """States of one row.

        Raises :class:`StoreError` when the row is not in the manifest, or its file is missing or damaged.
        """
        try:
            name, place = self.rows[row]
        except KeyError:
            raise StoreError(f"{self.folder}: row {row} is not in the manifest; run extract_shard again") from None
        try:
            return self._file(name).row(int(place))
        except FileNotFoundError:
            aside = self.folder / DAMAGED / Path(name).with_suffix(".txt")
            why = f" (it was moved aside: {aside.read_text().strip()})" if aside.is_file() else ""
            raise StoreError(f"{self.folder / name}: is gone, though the manifest names it{why}; {AGAIN}") from None
        except DamagedFile as error:
            raise StoreError(f"{self._put_aside(self.folder / name, error)}; {AGAIN}") from error
        except UnreadableFile:
            # It may be sound, so that there is nothing to compute again.
            raise
        except StoreError as error:
            raise StoreError(f"{error}; {AGAIN}") from error

    def _open(self, name: str) -> BatchFile:
        path = self.folder / name
        opened = BatchFile(path)
        # A file's name is the hash of its rows, so the places in the manifest are right where the name is.
        check_belongs(opened.header, path, self.key)
        return opened

    def _put_aside(self, path: Path, error: DamagedFile) -> str:
        # What is mapped here may have been replaced since: only what lies there now, and is damaged, is moved.
        verdict = examine(path, self.key)
        if verdict is None or verdict.error is None:
            return f"{error}; another process has moved or replaced it since"
        if isinstance(verdict.error, UnreadableFile):
            return f"{error}, and now {verdict.error}"
        try:
            aside = move_aside(path, str(error), verdict.seen)
        except StoreError as unmoved:
            return str(unmoved)
        return f"{error}; it is moved to {aside}"

    def __reduce__(self) -> tuple[Any, ...]:
        # A worker process of a DataLoader maps the files anew.
        return StoreReader, (self.folder, self.rows, self.key)
