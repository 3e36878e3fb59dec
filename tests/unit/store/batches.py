"""Batch files for tests, put together by hand after :func:`draftsmith.store.layout`."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from batch_bytes import batch_bytes
from draftsmith import store
from draftsmith.store import BatchHeader, StoreReader

LAYERS, WIDTH = [1, 2, 5], 6
KEY = store.fingerprint("target", LAYERS, "float32")
# Three rows of 1, 4 and 2 tokens.
ROWS = [[7], [3, 1, 4, 1], [5, 9]]
IDS = [store.row_id(tokens) for tokens in ROWS]


def states(rows: Sequence[Sequence[int]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """aux [T, A, H] and final [T, H] of all rows; a token's states follow from its row's tokens alone."""
    aux, final = [], []
    for tokens in rows:
        generator = torch.Generator().manual_seed(int(store.row_id(tokens)[:8], 16))
        aux.append(torch.randn(len(tokens), len(LAYERS), WIDTH, generator=generator))
        final.append(torch.randn(len(tokens), WIDTH, generator=generator))
    return torch.cat(aux).to(dtype), torch.cat(final).to(dtype)


def contents(rows: Sequence[Sequence[int]], dtype: torch.dtype, storage: store.Storage) -> dict[str, Tensor]:
    """Every tensor of a batch file of these rows."""
    aux, final = states(rows, dtype)
    made = {"aux": aux, "final": final}
    if storage == "fp8":
        for name in ("aux", "final"):
            made[name], made[f"{name}_scale"] = store.quantise(made[name])
    starts = list(accumulate(map(len, rows), initial=0))
    ids = [token for tokens in rows for token in tokens]
    return made | {"offsets": torch.tensor(starts), "token_ids": torch.tensor(ids, dtype=torch.int32)}


def encode(
    rows: Sequence[Sequence[int]] = ROWS,
    dtype: torch.dtype = torch.float32,
    storage: store.Storage = "plain",
    key: str = KEY,
    **header: Any,
) -> tuple[str, bytes]:
    """Name and bytes of a batch file."""
    tensors = contents(rows, dtype, storage)
    places = list(pairwise(tensors["offsets"].tolist()))
    described = BatchHeader(
        fingerprint=key, target="target", layers=LAYERS, dtype=str(dtype).removeprefix("torch."), storage=storage, hidden_size=WIDTH,
        rows=[store.row_id(tokens) for tokens in rows], lengths=[len(tokens) for tokens in rows],
        checksums=[store.checksum(*store.row_parts(tensors, slice(start, end))) for start, end in places], **({"vllm": "0"} | header),
    )  # fmt: skip
    return store.batch_name(described.rows), batch_bytes(described, tensors)


def write_batch(folder: Path, *args: Any, **kwargs: Any) -> Path:
    """Write a batch file, as a publisher does, by a rename."""
    name, content = encode(*args, **kwargs)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{name}.{os.getpid()}.tmp"
    temporary.write_bytes(content)
    temporary.replace(folder / name)
    return folder / name


def reader(path: Path, ids: Sequence[str] = IDS, key: str | None = None) -> StoreReader:
    """A reader as a manifest of this file would give it."""
    return StoreReader(path.parent, {row: (path.name, place) for place, row in enumerate(ids)}, key)


# ---- what happens to files ----


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def flipped_data(path: Path) -> None:
    """A byte of the last row's final state; the header stays as it was."""
    header, places = store.read_header(path)
    at, size = places["final"]
    flip(path, at + size - 1)
    assert store.read_header(path)[0] == header


def flipped_header(path: Path) -> None:
    """The target's name in the header, by a bit, so that all of it still reads well."""
    flip(path, path.read_bytes().index(b"target", 60))


def zeroed(path: Path) -> None:
    """What is left of a file whose blocks a crash never wrote."""
    path.write_bytes(bytes(path.stat().st_size))


def zeroed_data(path: Path) -> None:
    """The head came to the disk, as it was written first, and the data did not."""
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    path.write_bytes(content[: 8 + size] + bytes(len(content) - 8 - size))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def of_another_fingerprint(path: Path) -> None:
    path.write_bytes(encode(key=store.fingerprint("target", [1, 2, 4], "float32"))[1])


def of_another_target(path: Path) -> None:
    path.write_bytes(encode(key=store.fingerprint("another", LAYERS, "float32"))[1])


def renamed_over(path: Path) -> None:
    """Another batch of the same fingerprint, with rows of the same lengths, takes its name."""
    path.write_bytes(encode([[8], [3, 1, 4, 2], [6, 9]])[1])


def plain_safetensors(path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"aux": torch.zeros(7, 3, 6), "final": torch.zeros(7, 6)}, path)


def of_format_1(path: Path) -> None:
    """As the first version wrote them: no checksum of the head, no storage."""
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    entries = json.loads(content[8 : 8 + size])
    written = json.loads(entries["__metadata__"]["draftsmith"]) | {"format": 1}
    del written["storage"]
    entries["__metadata__"] = {"draftsmith": json.dumps(written)}
    text = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        (value,) = file.read(1)
        file.seek(at)
        file.write(bytes([value ^ 0x04]))


DAMAGE: list[Callable[[Path], None]] = [
    truncated, longer, flipped_data, flipped_header, zeroed, zeroed_data, empty, of_another_fingerprint, of_another_target,
    renamed_over, plain_safetensors,
]  # fmt: skip
