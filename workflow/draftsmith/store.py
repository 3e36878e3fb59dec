"""The store: batch files of hidden states that are complete or absent, found again by what is in them.

A store holds one folder a fingerprint; what is hashed into the fingerprint is everything that changes a state's bytes apart
from the row itself (:func:`fingerprint`). A batch file is a safetensors file named after its rows::

    aux        [T, A, H]  target dtype   inputs of the layers `layers` (residual added), ascending
    final      [T, H]     target dtype   state after the final norm: what lm_head takes
    token_ids  [T]        int32          as the engine saw them
    offsets    [R + 1]    int64          row r is tokens offsets[r] to offsets[r + 1]

Its header's ``__metadata__["draftsmith"]`` is JSON with what a stranger needs to trust it (:class:`BatchHeader`), a
checksum for each row among it. Which shard or host wrote a file plays no part: any of them finds a row that is there.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from draftsmith.errors import DraftsmithError

if TYPE_CHECKING:
    from torch import Tensor

# Raise it when the bytes of a batch file come to mean something else; every store then starts anew.
FORMAT_VERSION = 1
SUFFIX = ".safetensors"
_AGAIN = "snakemake with `--forcerun extract_shard` computes its rows again"
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_SAFETENSORS_NAME = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class StoreError(DraftsmithError):
    """A batch file that cannot be trusted; its sentence names the file and the row."""


class BatchHeader(BaseModel):
    """What a batch file says of itself."""

    model_config = ConfigDict(extra="forbid")

    format: int = FORMAT_VERSION
    fingerprint: str
    target: str
    layers: list[int]
    final: str = "post-norm"
    dtype: str
    hidden_size: int
    rows: list[str]
    lengths: list[int]
    checksums: list[str]
    vllm: str

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return sum(self.lengths)


@dataclass(frozen=True)
class Row:
    """Hidden states of one row of L tokens: views onto the file, not to be written to."""

    token_ids: Tensor  # int32 [L]
    aux: Tensor  # [L, A, H]
    final: Tensor  # [L, H]


def row_id(input_ids: Iterable[int]) -> str:
    """Identity of a row: the first 32 hex digits of SHA-256 over its token ids as little-endian int32."""
    import numpy as np

    return hashlib.sha256(np.asarray(input_ids, dtype="<i4").tobytes()).hexdigest()[:32]


def fingerprint(target: str, layers: Sequence[int], dtype: str, engine_args: Mapping[str, Any] | None = None) -> str:
    """Name of the folder for states of a target (its own fingerprint, revision included), layer ids and dtype.

    ``engine_args`` are arguments of the engine that the user chose: a quantisation or an override among them changes states.
    """
    known = {"format": FORMAT_VERSION, "target": target, "layers": list(layers), "dtype": dtype}
    what = json.dumps(known | ({"engine_args": dict(engine_args)} if engine_args else {}), sort_keys=True)
    return hashlib.sha256(what.encode()).hexdigest()[:16]


def batch_name(rows: Sequence[str]) -> str:
    """File name of the batch of these rows, in this order."""
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()[:16] + SUFFIX


def bytes_per_token(layers: int, hidden_size: int, dtype: str) -> int:
    """Bytes that one token takes in a batch file: (layers + 1) states of hidden_size numbers, its id apart."""
    return (layers + 1) * hidden_size * _BYTES[dtype]


def checksum(aux: Any, final: Any) -> str:
    """xxh3-64 of a row's aux bytes followed by its final bytes; both are C-contiguous buffers."""
    state = xxhash.xxh3_64()
    state.update(aux)
    state.update(final)
    return state.hexdigest()


def layout(header: BatchHeader) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """The head of a batch file, and for each tensor its first byte in the file and its size in bytes.

    Data starts at a multiple of 64 bytes, so that mapped views are aligned for every dtype.
    """
    tokens, width = header.tokens, header.hidden_size
    item, name = _BYTES[header.dtype], _SAFETENSORS_NAME[header.dtype]
    shapes = {
        "aux": (name, [tokens, len(header.layers), width], tokens * len(header.layers) * width * item),
        "final": (name, [tokens, width], tokens * width * item),
        "offsets": ("I64", [len(header.rows) + 1], (len(header.rows) + 1) * 8),
        "token_ids": ("I32", [tokens], tokens * 4),
    }
    entries: dict[str, Any] = {"__metadata__": {"draftsmith": header.model_dump_json()}}
    places: dict[str, tuple[int, int]] = {}
    position = 0
    for tensor, (dtype, shape, size) in shapes.items():
        entries[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}
        places[tensor] = (position, size)
        position += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    start = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, {tensor: (start + at, size) for tensor, (at, size) in places.items()}


def read_header(path: Path) -> tuple[BatchHeader, dict[str, tuple[int, int]]]:
    """Read and check the head of a batch file; the states themselves are not read.

    Raises :class:`StoreError` when the file is cut short, has bytes too many, or is no batch file.
    """
    try:
        with open(path, "rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            entries = json.loads(file.read(min(size, 1 << 28)))
        header = BatchHeader.model_validate_json(entries["__metadata__"]["draftsmith"])
    except (OSError, ValueError, struct.error, KeyError, TypeError, ValidationError) as error:
        raise StoreError(f"{path}: no readable batch file ({type(error).__name__})") from error
    if header.format != FORMAT_VERSION:
        raise StoreError(f"{path}: has format {header.format}, this version reads {FORMAT_VERSION}")
    head, places = layout(header)
    expected = max(at + length for at, length in places.values())
    actual = path.stat().st_size
    if len(head) != 8 + size or actual != expected:
        raise StoreError(f"{path}: is {actual} bytes long and should be {expected}")
    return header, places


@dataclass
class StoreIndex:
    """Rows that the folder of a fingerprint holds, and the files that were passed over, with the reason."""

    rows: dict[str, tuple[str, int]]
    tokens: dict[str, int]
    bad: dict[str, str]


def scan(folder: Path, key: str) -> StoreIndex:
    """Read the head of every batch file in ``folder``; files of another fingerprint or broken ones are listed as bad."""
    index = StoreIndex({}, {}, {})
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            header, _ = read_header(path)
        except StoreError as error:
            index.bad[path.name] = f"{error}; it is ignored and its rows are computed again"
            continue
        if header.fingerprint != key:
            index.bad[path.name] = f"{path}: belongs to the fingerprint {header.fingerprint}, not {key}; it is ignored"
            continue
        for place, (row, length) in enumerate(zip(header.rows, header.lengths, strict=True)):
            index.rows.setdefault(row, (path.name, place))
            index.tokens[row] = length
    return index


class _BatchFile:
    """A batch file mapped into memory."""

    def __init__(self, path: Path) -> None:
        import torch

        self.path = path
        self.header, places = read_header(path)
        with open(path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        view = memoryview(self._map)
        dtype = getattr(torch, self.header.dtype)
        width, layers = self.header.hidden_size, len(self.header.layers)

        def tensor(name: str, kind: torch.dtype) -> Tensor:
            at, size = places[name]
            # A writable flag would need a private copy; the views are read-only by agreement.
            return torch.frombuffer(view[at : at + size], dtype=kind)

        import warnings

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            self.aux = tensor("aux", dtype).view(-1, layers, width)
            self.final = tensor("final", dtype).view(-1, width)
            self.token_ids = tensor("token_ids", torch.int32)
            self.offsets = tensor("offsets", torch.int64).tolist()
        self.verified: set[int] = set()

    def row(self, place: int) -> Row:
        """The row at ``place``; its checksum is compared the first time."""
        import torch

        start, end = self.offsets[place], self.offsets[place + 1]
        row = Row(self.token_ids[start:end], self.aux[start:end], self.final[start:end])
        if place not in self.verified:
            found = checksum(row.aux.view(torch.uint8).numpy(), row.final.view(torch.uint8).numpy())
            if found != self.header.checksums[place] or row_id(row.token_ids.numpy()) != self.header.rows[place]:
                raise StoreError(
                    f"{self.path}: the states of row {self.header.rows[place]} do not have their checksum; "
                    f"delete the file; {_AGAIN}"
                )
            self.verified.add(place)
        return row


def open_batch(path: Path) -> _BatchFile:
    """Map a batch file; ``row(place)`` then gives its rows, checked."""
    return _BatchFile(path)


class StoreReader:
    """Random access to the rows of a manifest, without copying: every row is a view onto a mapped file."""

    def __init__(self, folder: Path, rows: dict[str, Sequence[Any]]) -> None:
        """``rows`` maps a row id to (file name, place in the file), as manifest.json has it."""
        self.folder = folder
        self.rows = rows
        self._files: dict[str, _BatchFile] = {}

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
                self._files[name] = _BatchFile(self.folder / name)
            except StoreError as error:
                raise StoreError(f"{error}, though the manifest names it; {_AGAIN}") from error
        return self._files[name].row(int(place))

    def __getstate__(self) -> dict[str, Any]:
        # A worker process of a DataLoader maps the files anew.
        return {"folder": self.folder, "rows": self.rows, "_files": {}}
