"""One manifest for all shards: every row exactly once, and the same bytes whatever the number of shards."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from draftsmith import merge_manifest, store
from draftsmith.errors import DraftsmithError
from draftsmith.files import read_json, write_json

# Rows of 3, 5, 7, 11 and 13 tokens; the answer of each ends two tokens before the row, but for that of the second.
TOKENS = {f"r{place}": list(range(place, place + length)) for place, length in enumerate([3, 5, 7, 11, 13])}
ENDS = {row: len(ids) - (0 if row == "r1" else 2) for row, ids in TOKENS.items()}
KEY = "0" * 16
# The rows of two batch files; the last row failed.
BATCHES = [["r0", "r2"], ["r1", "r3"]]
FAILED = {"row_id": store.row_id(TOKENS["r4"]), "traceback": "Traceback (most recent call last): …"}


def ids(*rows: str) -> list[str]:
    """The ids of rows, whole."""
    return [store.row_id(TOKENS[row]) for row in rows]


def batch(folder: Path, rows: list[list[int]]) -> str:
    """A batch file of these rows with states of zeros; its name."""
    header = store.BatchHeader(
        fingerprint=KEY, target="t", layers=[1, 2], dtype="float32", hidden_size=4, rows=[store.row_id(row) for row in rows],
        lengths=[len(row) for row in rows], checksums=[""] * len(rows), vllm="0",
    )  # fmt: skip
    head, places = store.layout(header)
    name = store.batch_name(header.rows)
    (folder / name).write_bytes(head + bytes(max(at + size for at, size in places.values()) - len(head)))
    return name


def places(folder: Path, cut: bool = False) -> dict[str, list[Any]]:
    """Name and place of each row that did not fail, by the id of the whole row."""
    found = {}
    for rows in BATCHES:
        name = batch(folder / "store", [TOKENS[row][: ENDS[row] if cut else None] for row in rows])
        found |= {ids(row)[0]: [name, place] for place, row in enumerate(rows)}
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """rows.parquet and a store of two files."""
    table = {
        "row_id": ids(*TOKENS),
        "length": [len(tokens) for tokens in TOKENS.values()],
        "input_ids": [np.array(tokens, dtype=np.int32) for tokens in TOKENS.values()],
        "span_ends": [np.array([1, ENDS[row]], dtype=np.int32) for row in TOKENS],
    }
    pd.DataFrame(table).to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "store").mkdir()
    places(tmp_path)
    return tmp_path


def shard(
    folder: Path,
    name: str,
    rows: list[str],
    failed: list[dict[str, str]] | None = None,
    cut: bool = False,
    **other: Any,
) -> Path:
    path = folder / f"{name}.json"
    common = {
        "format": 2,
        "store": str(folder / "store"),
        "fingerprint": KEY,
        "layers": [1, 2],
        "dtype": "float32",
        "hidden_size": 4,
    }
    where = places(folder, cut)
    write_json(
        path, common | {"rows": {row: where[row] for row in ids(*rows)}, "failed": failed or [], "figures": {}} | other
    )
    return path


def merge(folder: Path, *shards: Path) -> dict[str, Any]:
    merge_manifest.run(rows=folder / "rows.parquet", shards=shards, manifest=folder / "manifest.json")
    merged: dict[str, Any] = read_json(folder / "manifest.json")
    return merged


def refusal(folder: Path, *shards: Path) -> str:
    with pytest.raises(DraftsmithError) as error:
        merge(folder, *shards)
    assert not (folder / "manifest.json").exists()
    (sentence,) = str(error.value).splitlines()
    return sentence


def test_two_shards_are_joined_in_the_order_of_the_rows(folder: Path) -> None:
    merged = merge(folder, shard(folder, "1-of-2", ["r3", "r0"]), shard(folder, "2-of-2", ["r2", "r1"], [FAILED]))
    where = places(folder)
    assert list(merged["rows"].items()) == [(row, where[row]) for row in ids("r0", "r1", "r2", "r3")]
    assert merged["failed"] == [FAILED]
    assert merged["tokens"] == 3 + 5 + 7 + 11
    assert merged["files"] == 2
    assert merged["bytes"] == sum(path.stat().st_size for path in (folder / "store").iterdir())
    assert (merged["storage"], merged["supervised_only"]) == ("plain", False)


def test_the_number_of_shards_changes_no_byte(folder: Path) -> None:
    merge(folder, shard(folder, "1-of-1", ["r0", "r1", "r2", "r3"], [FAILED]))
    one = (folder / "manifest.json").read_bytes()
    merge(
        folder,
        shard(folder, "1-of-3", ["r3"]),
        shard(folder, "2-of-3", ["r1", "r2"], [FAILED]),
        shard(folder, "3-of-3", ["r0"]),
    )
    assert (folder / "manifest.json").read_bytes() == one


def test_a_shard_without_rows(folder: Path) -> None:
    merged = merge(folder, shard(folder, "1-of-2", ["r0", "r1", "r2", "r3"], [FAILED]), shard(folder, "2-of-2", []))
    assert len(merged["rows"]) == 4


def test_a_row_in_two_shards(folder: Path) -> None:
    sentence = refusal(
        folder, shard(folder, "1-of-2", ["r0", "r1"]), shard(folder, "2-of-2", ["r1", "r2", "r3"], [FAILED])
    )
    assert sentence == (
        f"row {ids('r1')[0]} is in {folder}/1-of-2.json and in {folder}/2-of-2.json; delete both and extract again"
    )


def test_a_row_that_failed_and_did_not(folder: Path) -> None:
    (row,) = ids("r0")
    failed = [{"row_id": row, "traceback": "…"}]
    assert f"row {row} is in" in refusal(folder, shard(folder, "1-of-1", ["r0", "r1", "r2", "r3"], [*failed, FAILED]))


def test_rows_that_are_in_no_shard(folder: Path) -> None:
    assert refusal(folder, shard(folder, "1-of-1", ["r0", "r2"])) == (
        f"{folder}/rows.parquet: 3 rows are in no shard's manifest, the first is {ids('r1')[0]}; delete the manifests and extract again"
    )


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"fingerprint": "1" * 16}, "its fingerprint is 1111111111111111, that of"),
        ({"layers": [1, 3]}, "its layers is [1, 3], that of"),
        ({"dtype": "bfloat16"}, "its dtype is bfloat16, that of"),
        ({"storage": "fp8"}, "its storage is fp8, that of"),
        ({"supervised_only": True}, "its supervised_only is True, that of"),
    ],
)
def test_shards_of_different_runs(folder: Path, other: dict[str, Any], words: str) -> None:
    sentence = refusal(
        folder, shard(folder, "1-of-2", ["r0", "r1"]), shard(folder, "2-of-2", ["r2", "r3"], [FAILED], **other)
    )
    assert sentence.startswith(f"{folder}/2-of-2.json: {words}")


AGAIN = "though a shard's manifest names it; snakemake with `--forcerun extract_shard` computes its rows again"


def first_file(folder: Path) -> Path:
    """The batch file of r0 and r2."""
    return folder / "store" / places(folder)[ids("r0")[0]][0]


def test_a_file_of_the_store_that_is_gone(folder: Path) -> None:
    manifest = shard(folder, "1-of-1", ["r0", "r1", "r2", "r3"], [FAILED])
    first_file(folder).unlink()
    (left,) = (folder / "store").iterdir()
    sentence = refusal(folder, manifest)
    assert sentence.endswith(f": is gone, {AGAIN}")
    assert left.name not in sentence


def test_a_file_of_the_store_with_another_size(folder: Path) -> None:
    manifest = shard(folder, "1-of-1", ["r0", "r1", "r2", "r3"], [FAILED])
    path = first_file(folder)
    size = path.stat().st_size
    os.truncate(path, size - 1)
    assert refusal(folder, manifest) == f"{path}: is {size - 1} bytes long and should be {size}, {AGAIN}"


def test_a_file_of_the_store_under_another_name(folder: Path) -> None:
    manifest = shard(folder, "1-of-1", ["r0", "r1", "r2", "r3"], [FAILED])
    path = first_file(folder)
    (other,) = [file for file in (folder / "store").iterdir() if file != path]
    path.write_bytes(other.read_bytes())
    assert refusal(folder, manifest) == f"{path}: is the file {other.name} under another name, {AGAIN}"


def test_a_file_of_another_fingerprint(folder: Path) -> None:
    manifest = shard(folder, "1-of-1", ["r0", "r1", "r2", "r3"], [FAILED], fingerprint="1" * 16)
    assert f"belongs to the fingerprint {KEY}, not 1111111111111111, {AGAIN}" in refusal(folder, manifest)


@pytest.mark.parametrize("place", [0, 2])
def test_a_row_that_is_not_at_its_place(folder: Path, place: int) -> None:
    manifest = shard(folder, "1-of-1", ["r0", "r1", "r2", "r3"], [FAILED])
    content = read_json(manifest)
    (row,) = ids("r2")
    content["rows"][row][1] = place
    write_json(manifest, content)
    assert f"does not hold row {row} at place {place}" in refusal(folder, manifest)


def test_rows_that_were_cut(folder: Path) -> None:
    """The manifest has the whole rows' ids, the store has those of what is left of them, whose tokens are counted."""
    merged = merge(folder, shard(folder, "1-of-1", ["r0", "r1", "r2", "r3"], [FAILED], cut=True, supervised_only=True))
    assert set(merged["rows"]) == set(ids("r0", "r1", "r2", "r3"))
    assert merged["supervised_only"] is True
    assert merged["tokens"] == 1 + 5 + 5 + 9


def test_whole_rows_do_not_stand_for_cut_ones(folder: Path) -> None:
    manifest = shard(folder, "1-of-1", ["r0", "r1", "r2", "r3"], [FAILED], supervised_only=True)
    assert f"does not hold row {ids('r0')[0]} at place 0" in refusal(folder, manifest)


def test_a_row_of_other_data(folder: Path) -> None:
    other = [{"row_id": "r9", "traceback": "…"}]
    assert refusal(folder, shard(folder, "1-of-1", ["r0", "r1", "r2", "r3"], [FAILED, *other])) == (
        f"{folder}/1-of-1.json: row r9 is not in {folder}/rows.parquet; delete the manifest and extract again"
    )
