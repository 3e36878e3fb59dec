"""merge_manifest: the shards' manifests as one, in the order of the rows, whatever the number of shards was."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from draftsmith.errors import DraftsmithError
from draftsmith.files import read_json, write_json
from draftsmith.log import log
from draftsmith.rows import read_rows

_COMMON = ("format", "store", "fingerprint", "layers", "dtype", "hidden_size")


def run(*, rows: Path, shards: Sequence[Path], manifest: Path) -> None:
    """Join the manifests of all ``shards``.

    Raises :class:`DraftsmithError` unless every row is there exactly once, in the store or among the failed.
    """
    table = read_rows(rows, ["row_id", "length"])
    parts = [read_json(path) for path in shards]
    for path, part in zip(shards, parts, strict=True):
        for name in _COMMON:
            if part[name] != parts[0][name]:
                raise DraftsmithError(
                    f"{path}: its {name} is {part[name]}, that of {shards[0]} is {parts[0][name]}; delete both and extract again"
                )
    seen: dict[str, Path] = {}
    for path, part in zip(shards, parts, strict=True):
        for row in [*part["rows"], *(entry["row_id"] for entry in part["failed"])]:
            if row in seen:
                raise DraftsmithError(f"row {row} is in {seen[row]} and in {path}; delete both and extract again")
            seen[row] = path
    absent = [row for row in table["row_id"] if row not in seen]
    if absent:
        raise DraftsmithError(
            f"{rows}: {len(absent)} rows are in no shard's manifest, the first is {absent[0]}; delete the manifests and extract again"
        )
    known = set(table["row_id"])
    foreign = next((row for row in seen if row not in known), None)
    if foreign is not None:
        raise DraftsmithError(f"{seen[foreign]}: row {foreign} is not in {rows}; delete the manifest and extract again")
    places = {row: place for part in parts for row, place in part["rows"].items()}
    lengths = dict(zip(table["row_id"], table["length"], strict=True))
    failed = [entry for part in parts for entry in part["failed"]]
    folder = Path(parts[0]["store"])
    files = sorted({name for name, _ in places.values()})
    gone = [name for name in files if not (folder / name).is_file()]
    if gone:
        raise DraftsmithError(
            f"{folder / gone[0]}: this batch file is gone from the store; delete {shards[0].parent} and extract again"
        )
    write_json(
        manifest,
        {name: parts[0][name] for name in _COMMON}
        | {
            "rows": {row: places[row] for row in table["row_id"] if row in places},
            "failed": failed,
            "tokens": int(sum(lengths[row] for row in places)),
            "files": len(files),
            "bytes": sum((folder / name).stat().st_size for name in files),
        },
    )
    log(f"merge: {len(places)} rows in {len(files)} batch files, {len(failed)} failed")
