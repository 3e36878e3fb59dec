"""merge_manifest: the shards' manifests as one, in the order of the rows, whatever the number of shards was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from draftsmith import store
from draftsmith.errors import DraftsmithError
from draftsmith.extract_shard.plan import PlannedRow, stored_rows
from draftsmith.files import read_json, write_json
from draftsmith.log import log

_COMMON = ("format", "store", "fingerprint", "layers", "dtype", "hidden_size")
_COMMON_DEFAULTS = {"storage": "plain", "supervised_only": False}
_THREADS = 8


def run(*, rows: Path, shards: Sequence[Path], manifest: Path) -> None:
    """Join the manifests of all ``shards``.

    Raises :class:`DraftsmithError` unless every row is there exactly once, in the store or among the failed, and every file
    of the store that a manifest names is what it was, by its head and its size.
    """
    parts = [read_json(path) for path in shards]
    common = _common(parts, shards)
    stored = stored_rows(rows, common["supervised_only"])
    seen: dict[str, Path] = {}
    for path, part in zip(shards, parts, strict=True):
        for row in [*part["rows"], *(entry["row_id"] for entry in part["failed"])]:
            if row in seen:
                raise DraftsmithError(f"row {row} is in {seen[row]} and in {path}; delete both and extract again")
            seen[row] = path
    absent = [row for row in stored if row not in seen]
    if absent:
        raise DraftsmithError(
            f"{rows}: {len(absent)} rows are in no shard's manifest, the first is {absent[0]}; delete the manifests and extract again"
        )
    foreign = next((row for row in seen if row not in stored), None)
    if foreign is not None:
        raise DraftsmithError(f"{seen[foreign]}: row {foreign} is not in {rows}; delete the manifest and extract again")
    places = {row: place for part in parts for row, place in part["rows"].items()}
    folder = Path(common["store"])
    files = sorted({name for name, _ in places.values()})
    _check_files(folder, files, common["fingerprint"], places, stored)
    failed = [entry for part in parts for entry in part["failed"]]
    write_json(
        manifest,
        common
        | {
            "rows": {row: places[row] for row in stored if row in places},
            "failed": failed,
            "tokens": sum(stored[row].length for row in places),
            "files": len(files),
            "bytes": sum((folder / name).stat().st_size for name in files),
        },
    )
    log(f"merge: {len(places)} rows in {len(files)} batch files, {len(failed)} failed")


def _common(parts: Sequence[dict[str, Any]], shards: Sequence[Path]) -> dict[str, Any]:
    """What all manifests have in common."""
    every = [
        {name: part[name] for name in _COMMON}
        | {name: part.get(name, value) for name, value in _COMMON_DEFAULTS.items()}
        for part in parts
    ]
    for path, each in zip(shards, every, strict=True):
        for name, value in each.items():
            if value != every[0][name]:
                raise DraftsmithError(
                    f"{path}: its {name} is {value}, that of {shards[0]} is {every[0][name]}; delete both and extract again"
                )
    return every[0]


def _check_files(
    folder: Path, files: Sequence[str], key: str, places: Mapping[str, Sequence[Any]], stored: Mapping[str, PlannedRow]
) -> None:
    def head(name: str) -> list[str]:
        try:
            header, _ = store.read_header(folder / name)
            store.check_belongs(header, folder / name, key)
        except store.StoreError as error:
            raise DraftsmithError(f"{error}, though a shard's manifest names it; {store.AGAIN}") from error
        return header.rows

    with ThreadPoolExecutor(_THREADS) as pool:
        held = dict(zip(files, pool.map(head, files), strict=True))
    for row, (name, place) in places.items():
        if held[name][place : place + 1] != [stored[row].row_id]:
            raise DraftsmithError(
                f"{folder / name}: does not hold row {row} at place {place}, as a shard's manifest says; {store.AGAIN}"
            )
