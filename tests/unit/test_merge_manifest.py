"""One manifest for all shards: every row exactly once, and the same bytes whatever the number of shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from draftsmith import merge_manifest
from draftsmith.errors import DraftsmithError
from draftsmith.files import read_json, write_json

LENGTHS = {"r0": 3, "r1": 5, "r2": 7, "r3": 11, "r4": 13}
PLACES = {
    "r0": ["a.safetensors", 0],
    "r1": ["b.safetensors", 0],
    "r2": ["a.safetensors", 1],
    "r3": ["b.safetensors", 1],
}
FAILED = {"row_id": "r4", "traceback": "Traceback (most recent call last): …"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """rows.parquet and a store of two files of 100 and 200 bytes."""
    pd.DataFrame({"row_id": list(LENGTHS), "length": list(LENGTHS.values())}).to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "store").mkdir()
    (tmp_path / "store/a.safetensors").write_bytes(bytes(100))
    (tmp_path / "store/b.safetensors").write_bytes(bytes(200))
    return tmp_path


def shard(folder: Path, name: str, rows: list[str], failed: list[dict[str, str]] | None = None, **other: Any) -> Path:
    path = folder / f"{name}.json"
    common = {
        "format": 1,
        "store": str(folder / "store"),
        "fingerprint": "f",
        "layers": [1, 2],
        "dtype": "float32",
        "hidden_size": 8,
    }
    write_json(
        path, common | {"rows": {row: PLACES[row] for row in rows}, "failed": failed or [], "figures": {}} | other
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
    assert list(merged["rows"].items()) == list(PLACES.items())
    assert merged["failed"] == [FAILED]
    assert merged["tokens"] == 3 + 5 + 7 + 11
    assert (merged["files"], merged["bytes"]) == (2, 300)


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
    merged = merge(folder, shard(folder, "1-of-2", list(PLACES), [FAILED]), shard(folder, "2-of-2", []))
    assert len(merged["rows"]) == 4


def test_a_row_in_two_shards(folder: Path) -> None:
    sentence = refusal(
        folder, shard(folder, "1-of-2", ["r0", "r1"]), shard(folder, "2-of-2", ["r1", "r2", "r3"], [FAILED])
    )
    assert sentence == f"row r1 is in {folder}/1-of-2.json and in {folder}/2-of-2.json; delete both and extract again"


def test_a_row_that_failed_and_did_not(folder: Path) -> None:
    failed = [{"row_id": "r0", "traceback": "…"}]
    assert "row r0 is in" in refusal(folder, shard(folder, "1-of-1", list(PLACES), [*failed, FAILED]))


def test_rows_that_are_in_no_shard(folder: Path) -> None:
    assert refusal(folder, shard(folder, "1-of-1", ["r0", "r2"])) == (
        f"{folder}/rows.parquet: 3 rows are in no shard's manifest, the first is r1; delete the manifests and extract again"
    )


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"fingerprint": "g"}, "its fingerprint is g, that of"),
        ({"layers": [1, 3]}, "its layers is [1, 3], that of"),
        ({"dtype": "bfloat16"}, "its dtype is bfloat16, that of"),
    ],
)
def test_shards_of_different_runs(folder: Path, other: dict[str, Any], words: str) -> None:
    sentence = refusal(
        folder, shard(folder, "1-of-2", ["r0", "r1"]), shard(folder, "2-of-2", ["r2", "r3"], [FAILED], **other)
    )
    assert sentence.startswith(f"{folder}/2-of-2.json: {words}")


def test_a_file_of_the_store_that_is_gone(folder: Path) -> None:
    (folder / "store/b.safetensors").unlink()
    assert refusal(folder, shard(folder, "1-of-1", list(PLACES), [FAILED])) == (
        f"{folder}/store/b.safetensors: this batch file is gone from the store; delete {folder} and extract again"
    )


def test_a_row_of_other_data(folder: Path) -> None:
    other = [{"row_id": "r9", "traceback": "…"}]
    assert refusal(folder, shard(folder, "1-of-1", list(PLACES), [FAILED, *other])) == (
        f"{folder}/1-of-1.json: row r9 is not in {folder}/rows.parquet; delete the manifest and extract again"
    )
