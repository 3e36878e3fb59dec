"""What conversations were made into by earlier runs, so that a run makes only those that are new.

A folder holds part files, Arrow IPC with a conversation a row: its key, and what :mod:`draftsmith.tokenize.packed_rows` made of it.
The folder's name is a fingerprint of everything else that rows depend on. A part is complete or absent, and its name is
the checksum of its bytes: one that was damaged is left out, and its conversations are made again. Parts are only ever
added, so runs may share the folder; what two of them make at once is there twice, and does no harm.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import xxhash

from draftsmith.files import atomic_path
from draftsmith.log import log
from draftsmith.tokenize.packed_rows import Packed

_SUFFIX = ".arrow"
_PART_BYTES = 8 << 20
# Work of so many seconds is kept at the latest, whatever its size.
_PART_SECONDS = 20.0
# More rows than a part can have.
_ROWS = 1 << 24
_BLOCK = 1 << 20
# Maps of part files that are open at once.
_OPEN_PARTS = 64
# An unfinished file of this age is of a run that was killed.
_STALE_SECONDS = 24 * 3600


class RowCache:
    """The parts in ``folder``; as a context manager it writes what was added last when it ends, however that is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Part and row in one number, which takes a third of a tuple's memory.
        self._index: dict[bytes, int] = {}
        self._paths: list[Path] = []
        self._open: OrderedDict[int, Any] = OrderedDict()
        self._keys: list[bytes] = []
        self._added: list[Packed] = []
        self._bytes, self._flushed = 0, time.monotonic()
        for path in self._sound_parts():
            self._enter(path)

    def __len__(self) -> int:
        return len(self._index)

    def get(self, key: bytes) -> Packed | None:
        """What the conversation of this key (16 bytes) was made into; None if no earlier run made it."""
        place = self._index.get(key)
        if place is None or (part := self._part(place // _ROWS)) is None:
            return None
        return Packed(*(part.column(name)[place % _ROWS].as_py() for name in Packed._fields))

    def add(self, key: bytes, packed: Packed) -> None:
        """Keep what the conversation of this key was made into, for later runs."""
        self._keys.append(key)
        self._added.append(packed)
        self._bytes += len(packed.rest) + len(packed.ids)
        if self._bytes >= _PART_BYTES or time.monotonic() - self._flushed > _PART_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what was added since the last part as a part of its own."""
        import pyarrow as pa

        self._flushed = time.monotonic()
        if not self._keys:
            return
        batch = pa.record_batch(
            {
                "key": pa.array(self._keys, pa.binary(16)),
                "rest": pa.array([packed.rest for packed in self._added], pa.string()),
                "ids": pa.array([packed.ids for packed in self._added], pa.binary()),
            }
        )
        content = pa.BufferOutputStream()
        with pa.ipc.new_file(content, batch.schema) as writer:
            writer.write_batch(batch)
        data = content.getvalue()
        # Not synced: after a power cut the name tells whether the bytes are all there.
        part = self.folder / f"{xxhash.xxh3_128_hexdigest(data)}{_SUFFIX}"
        with atomic_path(part, synced=False) as temporary:
            temporary.write_bytes(data)
        self._keys, self._added, self._bytes = [], [], 0

    def __enter__(self) -> RowCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.flush()
        self._open.clear()

    def _sound_parts(self) -> Iterator[Path]:
        """Part files whose bytes are those that were written; others are named and removed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(self.folder.iterdir()):
            with suppress(FileNotFoundError):
                if path.suffix == _SUFFIX:
                    if _checksum(path) == path.stem:
                        yield path
                        continue
                    log(f"{path}: is damaged and left out; its conversations are made again")
                    path.unlink()
                elif path.suffix == ".tmp" and time.time() - path.stat().st_mtime > _STALE_SECONDS:
                    path.unlink()

    def _enter(self, path: Path) -> None:
        self._paths.append(path)
        part = len(self._paths) - 1
        batch = self._part(part)
        if batch is not None:
            for row, key in enumerate(batch.column("key").to_pylist()):
                self._index[key] = part * _ROWS + row

    def _part(self, part: int) -> Any:
        """The part's record batch, its columns where they lie in the file; None if somebody has removed it."""
        import pyarrow as pa

        if part in self._open:
            self._open.move_to_end(part)
            return self._open[part]
        try:
            # The map stays as long as the batch that looks into it.
            batch = pa.ipc.open_file(pa.memory_map(str(self._paths[part]))).get_batch(0)
        except FileNotFoundError:
            return None
        self._open[part] = batch
        if len(self._open) > _OPEN_PARTS:
            self._open.popitem(last=False)
        return batch


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
