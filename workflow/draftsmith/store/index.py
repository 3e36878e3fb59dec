"""What a folder of the store holds: found again by what the files say of themselves, whoever wrote them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from draftsmith.store.format import SUFFIX, StoreError, read_header


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
