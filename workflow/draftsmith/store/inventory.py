"""What a store holds, fingerprint by fingerprint, by the heads of its files and the names in its folders."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from draftsmith.errors import DraftsmithError
from draftsmith.store.format import DTYPES, DamagedFile, OtherFormat, StoreError, bytes_per_token
from draftsmith.store.head import open_file, read_metadata
from draftsmith.store.index import Head, heads
from draftsmith.store.leftovers import Leftover, damaged, staging
from draftsmith.store.verification import Journal

_KEY = re.compile(r"[0-9a-f]{16}")


class Contents(BaseModel):
    """The folder of one fingerprint. What files of another format version say of themselves is taken as it is."""

    model_config = ConfigDict(extra="forbid")

    fingerprint: str
    formats: list[int] = []
    """Format versions of the files; this program reads its own."""
    target: str | None = None
    layers: list[int] = []
    dtype: str | None = None
    storage: str | None = None
    hidden_size: int | None = None
    files: int = 0
    rows: int = 0
    """Distinct rows."""
    duplicates: int = 0
    """Rows that two files hold, or more."""
    tokens: int = 0
    """Of all files, duplicates counted each time."""
    bytes: int = 0
    bytes_per_token: float | None = None
    """As measured: the files' bytes for each token."""
    formula: int | None = None
    """As :func:`draftsmith.store.bytes_per_token` has it, without token ids and heads."""
    newest: str | None = None
    """When the newest file was written, local time."""
    vllm: list[str] = []
    verified: int = 0
    """Files that the journal names as they are."""
    unreadable: dict[str, str] = {}
    """Reason by name of a file whose head is no head of this fingerprint."""
    staging: list[Leftover] = []
    damaged: list[Leftover] = []
    ledger: int = 0
    """Errors that extractions have left on record."""


def folders(store: Path) -> list[Path]:
    """The folders of the fingerprints in ``store``; a folder of a fingerprint itself is a store of one.

    Raises :class:`DraftsmithError` when there are none.
    """
    if not store.is_dir():
        raise DraftsmithError(f"{store}: no such folder; name that of extract.store")
    found = sorted(path for path in store.iterdir() if _KEY.fullmatch(path.name) and path.is_dir())
    if not found and _KEY.fullmatch(store.resolve().name):
        return [store if _KEY.fullmatch(store.name) else store.resolve()]
    if not found:
        raise DraftsmithError(
            f"{store}: is no store, as no folder in it is named after a fingerprint; name that of extract.store"
        )
    return found


def contents(folder: Path) -> Contents:
    """Read the heads of the files in the folder of a fingerprint."""
    made = Contents(
        fingerprint=folder.resolve().name, staging=staging(folder), damaged=damaged(folder), ledger=_errors(folder)
    )
    known, seen, newest = Journal(folder).read(), Counter[str](), 0
    vllm: set[str] = set()
    formats: set[int] = set()
    for head in heads(folder, made.fingerprint):
        try:
            values = _values(head)
        except FileNotFoundError:
            # An extraction that is running has moved it aside.
            continue
        except StoreError as error:
            made.unreadable[head.path.name] = str(error)
            continue
        made.files += 1
        made.bytes += head.seen.size
        made.verified += (head.path.name, head.seen) in known
        made.tokens += sum(values["lengths"])
        newest = max(newest, head.seen.mtime_ns)
        seen.update(values["rows"])
        vllm.add(str(values["vllm"]))
        formats.add(values["format"])
        for name in ("target", "layers", "dtype", "storage", "hidden_size"):
            if values[name] is not None:
                setattr(made, name, values[name])
    made.rows, made.duplicates = len(seen), sum(count > 1 for count in seen.values())
    made.vllm, made.formats = sorted(vllm), sorted(formats)
    if made.tokens:
        made.bytes_per_token = round(made.bytes / made.tokens, 1)
    if made.hidden_size and made.dtype in DTYPES:
        kind = "fp8" if made.storage == "fp8" else "target"
        made.formula = bytes_per_token(len(made.layers), made.hidden_size, made.dtype, kind)
    if newest:
        made.newest = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(newest / 1e9))
    return made


class _Told(BaseModel):
    """What a file of any format version may say of itself, as far as it is shown."""

    format: int
    target: str | None = None
    layers: list[int] | None = None
    dtype: str | None = None
    storage: str | None = None
    hidden_size: int | None = None
    rows: list[str] = []
    lengths: list[int] = []
    vllm: str | None = None


def _values(head: Head) -> dict[str, Any]:
    """What the file says of itself; raises its error where it has no head of its fingerprint."""
    if head.header is not None:
        return head.header.model_dump()
    if not isinstance(head.error, OtherFormat):
        raise head.error or StoreError(f"{head.path}: has no head")
    with open_file(head.path) as file:
        values, _ = read_metadata(file, head.path)
    try:
        return _Told.model_validate(values).model_dump()
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise DamagedFile(f"{head.path}: is no readable batch file (its {where} is of another kind)") from None


def _errors(folder: Path) -> int:
    count = 0
    for path in sorted((folder / ".ledger").glob("*.json*")):
        read: Callable[[str], Any] = json.loads
        try:
            text = path.read_text()
            entries = [read(line) for line in text.splitlines() if line] if path.suffix == ".jsonl" else read(text)
        except (OSError, ValueError):
            # A file that is just being written.
            continue
        count += len(entries) if isinstance(entries, list) else 1
    return count
