"""The format of a batch file: what is in it, where, and under which name.

A store holds one folder a fingerprint; what is hashed into the fingerprint is everything that changes a state's bytes apart
from the row itself (:func:`fingerprint`). A batch file is a safetensors file named after its rows::

    aux          [T, A, H]  inputs of the layers `layers` (residual added), ascending
    final        [T, H]     state after the final norm: what lm_head takes
    aux_scale    [T, A]     float32, only where storage is 'fp8': aux = aux_scale * float8
    final_scale  [T]        float32, likewise
    token_ids    [T]        int32, as the engine saw them
    offsets      [R + 1]    int64, row r is tokens offsets[r] to offsets[r + 1]

Its header's ``__metadata__["draftsmith"]`` is JSON with what a stranger needs to trust it (:class:`BatchHeader`), a
checksum for each row among it, and ``__metadata__["xxh3"]`` is the checksum of that text. With the token ids, whose hash a
row's id is, and the offsets, which follow from the lengths, no byte of a file can change unseen. Which shard or host wrote
a file plays no part: any of them finds a row that is there.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict

from draftsmith.errors import DraftsmithError

if TYPE_CHECKING:
    from torch import Tensor

# Raise it when the bytes of a batch file come to mean something else; every store then starts anew.
FORMAT_VERSION = 2
SUFFIX = ".safetensors"
AGAIN = "snakemake with `--forcerun extract_shard` computes its rows again"
"""The mend, for messages about a file that is gone or damaged."""
Storage = Literal["plain", "fp8"]
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int64": 8, "int32": 4}
DTYPES = frozenset({"float32", "bfloat16", "float16"})
"""What states may be read in."""
_SAFETENSORS_NAME = {
    "float32": "F32", "bfloat16": "BF16", "float16": "F16", "float8_e4m3fn": "F8_E4M3", "int64": "I64", "int32": "I32",
}  # fmt: skip
# In the order in which a row's checksum runs over them.
CHECKED = ("aux", "final", "aux_scale", "final_scale")


class StoreError(DraftsmithError):
    """States that cannot be had; its sentence names the file and the row."""


class DamagedFile(StoreError):
    """A file that is not, or no longer, what a writer of the store left under its name: damaged, or foreign."""


class UnreadableFile(StoreError):
    """A file that cannot be read here and now, and may be sound: it is left where it is."""


class OtherFormat(StoreError):
    """A batch file of another format version: sound perhaps, but not for this program."""


class BatchHeader(BaseModel):
    """What a batch file says of itself."""

    model_config = ConfigDict(extra="forbid")

    format: int = FORMAT_VERSION
    fingerprint: str
    target: str
    layers: list[int]
    final: str = "post-norm"
    dtype: str
    """Precision of the states as they are read."""
    storage: Storage = "plain"
    """How they lie in the file: in `dtype`, or as float8 with a scale for each state of a token."""
    hidden_size: int
    rows: list[str]
    lengths: list[int]
    checksums: list[str]
    vllm: str

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return sum(self.lengths)


def stored_as(storage: str, dtype: str) -> tuple[str, Storage]:
    """(dtype, storage) of a batch's header for the config's ``extract.storage`` and the target's dtype."""
    if storage == "fp8":
        return dtype, "fp8"
    return ("bfloat16" if storage == "bf16" else dtype), "plain"


def row_id(input_ids: Iterable[int]) -> str:
    """Identity of a row: the first 32 hex digits of SHA-256 over its token ids as little-endian int32."""
    import numpy as np

    return hashlib.sha256(np.asarray(input_ids, dtype="<i4").tobytes()).hexdigest()[:32]


def fingerprint(
    target: str,
    layers: Sequence[int],
    dtype: str,
    engine_args: Mapping[str, Any] | None = None,
    storage: str = "target",
) -> str:
    """Name of the folder for states of a target (by its :func:`~draftsmith.target_fingerprint.states_fingerprint`), layer ids, its dtype, and storage.

    ``engine_args`` are arguments of the engine that the user chose: a quantisation or an override among them changes states.
    """
    stored, kind = stored_as(storage, dtype)
    known: dict[str, Any] = {"format": FORMAT_VERSION, "target": target, "layers": list(layers), "dtype": dtype}
    if (stored, kind) != (dtype, "plain"):
        known["storage"] = [stored, kind]
    if engine_args:
        known["engine_args"] = dict(engine_args)
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]


def batch_name(rows: Sequence[str]) -> str:
    """File name of the batch of these rows, in this order."""
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()[:16] + SUFFIX


def bytes_per_token(layers: int, hidden_size: int, dtype: str, storage: str = "target") -> int:
    """Bytes that a token's states take: (layers + 1) states of hidden_size numbers, and their scales; its 4-byte id apart.

    ``dtype`` is the target's, ``storage`` the config's ``extract.storage``.
    """
    stored, kind = stored_as(storage, dtype)
    return (layers + 1) * (hidden_size + 4 if kind == "fp8" else hidden_size * _BYTES[stored])


def checksum(*parts: Any) -> str:
    """xxh3-64 of a row's bytes: its aux, its final, then its scales if any, each a C-contiguous buffer."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def shapes(header: BatchHeader) -> dict[str, tuple[str, tuple[int, ...]]]:
    """dtype and shape of each tensor of a batch file, in the order in which they lie there."""
    tokens, layers = header.tokens, len(header.layers)
    number = "float8_e4m3fn" if header.storage == "fp8" else header.dtype
    found: dict[str, tuple[str, tuple[int, ...]]] = {
        "aux": (number, (tokens, layers, header.hidden_size)),
        "final": (number, (tokens, header.hidden_size)),
    }
    if header.storage == "fp8":
        found |= {"aux_scale": ("float32", (tokens, layers)), "final_scale": ("float32", (tokens,))}
    return found | {"offsets": ("int64", (len(header.rows) + 1,)), "token_ids": ("int32", (tokens,))}


def layout(header: BatchHeader) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """The head of a batch file, and for each tensor its first byte in the file and its size in bytes.

    Every tensor starts at a multiple of 8 bytes and the data at one of 64, so that mapped views are aligned for every dtype.
    """
    written = header.model_dump_json()
    entries: dict[str, Any] = {"__metadata__": {"draftsmith": written, "xxh3": checksum(written.encode())}}
    places: dict[str, tuple[int, int]] = {}
    position = 0
    for tensor, (dtype, shape) in _aligned(shapes(header)).items():
        size = _BYTES[dtype]
        for extent in shape:
            size *= extent
        entries[tensor] = {
            "dtype": _SAFETENSORS_NAME[dtype],
            "shape": list(shape),
            "data_offsets": [position, position + size],
        }
        places[tensor] = (position, size)
        position += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    start = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, {tensor: (start + at, size) for tensor, (at, size) in places.items()}


def _aligned(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> dict[str, tuple[str, tuple[int, ...]]]:
    # safetensors allows no gaps, so wide elements come first: every later tensor then starts at a multiple of its own.
    return dict(sorted(tensors.items(), key=lambda item: -_BYTES[item[1][0]]))


def tensors(header: BatchHeader, places: Mapping[str, tuple[int, int]], part: Any) -> dict[str, Tensor]:
    """Views of a batch's tensors; ``part(at, size)`` gives the bytes [at, at + size) of the file as a uint8 tensor."""
    import torch

    return {
        name: part(*places[name]).view(getattr(torch, dtype)).view(shape)
        for name, (dtype, shape) in shapes(header).items()
    }  # fmt: skip


def row_parts(views: Mapping[str, Tensor], rows: slice) -> list[Any]:
    """The buffers that a row's checksum runs over."""
    return [buffer(views[name][rows]) for name in CHECKED if name in views]


def buffer(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, without a copy."""
    import torch

    # By way of uint8, since numpy knows no bfloat16.
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
