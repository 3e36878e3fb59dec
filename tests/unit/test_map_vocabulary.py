"""map_vocabulary: the rule by hand, and from files to files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

from draftsmith import map_vocabulary
from draftsmith.config import parse
from draftsmith.errors import DraftsmithError


def counts(given: dict[int, int], total: int = 12) -> np.ndarray[Any, np.dtype[np.int64]]:
    found = np.zeros(total, dtype=np.int64)
    for token, count in given.items():
        found[token] = count
    return found


@pytest.mark.parametrize(
    ("given", "size", "special", "ids", "padded"),
    [
        ({7: 5, 3: 5, 9: 1}, 4, [], [0, 3, 7, 9], 1),
        ({10: 1, 11: 1, 0: 1}, 4, [], [0, 1, 10, 11], 1),
        # Of equals the smaller id.
        ({5: 2, 4: 2, 3: 2}, 2, [], [3, 4], 0),
        # Fewer distinct tokens than places.
        ({2: 3, 1: 2, 11: 1}, 8, [], [0, 1, 2, 3, 4, 5, 6, 11], 5),
        # A special token takes the place of the least frequent, of equals the larger id.
        ({7: 5, 3: 4, 9: 4}, 3, [1], [1, 3, 7], 1),
        ({7: 5, 3: 5, 9: 1}, 2, [9, 11], [9, 11], 1),
        # One that is frequent anyway evicts nobody.
        ({7: 5, 3: 5, 9: 1}, 3, [7], [3, 7, 9], 0),
        ({7: 5}, 12, [], list(range(12)), 11),
    ],
)
def test_choice_by_hand(given: dict[int, int], size: int, special: list[int], ids: list[int], padded: int) -> None:
    found, unused = map_vocabulary.choose(counts(given), size, special)
    assert found.tolist() == ids
    assert unused == padded


def test_choice_needs_room_for_special_tokens() -> None:
    with pytest.raises(DraftsmithError, match=r"vocabulary\.size is 1, but 2 special tokens .* set it to 2 or more"):
        map_vocabulary.choose(counts({}), 1, [3, 4])
    with pytest.raises(DraftsmithError, match="do not fit a target vocabulary of 12"):
        map_vocabulary.choose(counts({}), 4, [12])


def test_coverage() -> None:
    assert map_vocabulary.coverage(counts({7: 5, 3: 4, 9: 1}), np.asarray([3, 7])) == 0.9


ROW = {"split": "train", "input_ids": [5, 5, 7, 3, 7, 9, 4], "span_starts": [2, 5], "span_ends": [4, 7]}


class Bench:
    def __init__(self, folder: Path, rows: list[dict[str, Any]], special: list[int], total: int = 12) -> None:
        self.folder = folder
        schema = pa.schema([
            ("split", pa.string()), *((name, pa.list_(pa.int32())) for name in ("input_ids", "span_starts", "span_ends"))
        ])  # fmt: skip
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), folder / "rows.parquet")
        (folder / "target.json").write_text(json.dumps({"vocab_size": total}))
        (folder / "tokenize.json").write_text(json.dumps({"special_ids_kept": special}))

    def run(self, size: int | None, source: Path | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        train = {} if source is None else {"initial_draft": str(source)}
        map_vocabulary.run(
            parse({"vocabulary": {"size": size}, "train": train}, "test"),
            target=self.folder / "target.json",
            rows=self.folder / "rows.parquet",
            tokenize_report=self.folder / "tokenize.json",
            vocabulary=self.folder / "vocabulary.safetensors",
            report=self.folder / "vocabulary.json",
        )
        return load_file(self.folder / "vocabulary.safetensors"), json.loads(
            (self.folder / "vocabulary.json").read_text()
        )


def test_only_supervised_tokens_of_training_rows_count(tmp_path: Path) -> None:
    rows = [ROW, ROW | {"split": "validation", "input_ids": [1] * 7}]
    # 7 and 3 of the first span, 9 and 4 of the second.
    bench = Bench(tmp_path, rows, [])
    found = map_vocabulary.count_supervised(tmp_path / "rows.parquet", 12)
    assert found["train"].tolist() == counts({7: 1, 3: 1, 9: 1, 4: 1}).tolist()
    assert found["validation"].tolist() == counts({1: 4}).tolist()
    tensors, report = bench.run(3)
    assert (tensors["d2t"] + np.arange(3)).tolist() == [3, 4, 7]
    assert report["coverage"] == 0.75
    assert report["distinct"] == 4


def test_files(tmp_path: Path) -> None:
    rows = [{"split": "train", "input_ids": [7] * 5 + [3] * 5 + [9], "span_starts": [0], "span_ends": [11]}]
    tensors, report = Bench(tmp_path, rows, [0]).run(4)
    assert tensors["d2t"].dtype == np.int64
    assert tensors["d2t"].tolist() == [0, 2, 5, 6]
    assert tensors["t2d"].dtype == np.bool_
    assert np.flatnonzero(tensors["t2d"]).tolist() == [0, 3, 7, 9]
    assert len(tensors["t2d"]) == 12
    assert report == {
        "size": 4, "target_size": 12, "coverage": 1.0, "distinct": 3, "padded": 1, "kept_special": [0],
        "coverage_by_size": [[4, 1.0], [12, 1.0]], "size_by_coverage": [[0.95, 4], [0.98, 4], [0.99, 4]],
    }  # fmt: skip


def test_coverage_by_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(map_vocabulary, "_SIZES", (1, 2, 6, 99))
    rows = [{"split": "train", "input_ids": [7] * 5 + [3] * 4 + [9], "span_starts": [0], "span_ends": [10]}]
    _, report = Bench(tmp_path, rows, [7]).run(3)
    assert report["coverage_by_size"] == [[1, 0.5], [2, 0.9], [3, 1.0], [6, 1.0], [12, 1.0]]
    assert "validation" not in report


def test_the_least_sizes_and_what_validation_rows_find_in_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(map_vocabulary, "_SIZES", (1, 2, 3))
    trained = [7] * 94 + [3] + [9] * 3 + [4, 5]
    held_out = [7] * 8 + [4, 11]
    rows = [
        {"split": "train", "input_ids": trained, "span_starts": [0], "span_ends": [100]},
        {"split": "validation", "input_ids": held_out, "span_starts": [0], "span_ends": [10]},
    ]
    _, report = Bench(tmp_path, rows, []).run(2)
    # By training: 7 (94), 9 (3), then 3, 4 and 5 (1 each), then what was never seen, smallest first: 0, 1, 2, 6, 8, 10, 11.
    assert report["coverage_by_size"] == [[1, 0.94], [2, 0.97], [3, 0.98], [12, 1.0]]
    assert report["size_by_coverage"] == [[0.95, 2], [0.98, 3], [0.99, 4]]
    # Of ten held-out tokens 7 is eight, 4 is at rank 4 and 11 at the very end.
    assert report["validation"] == {
        "coverage": 0.8,
        "coverage_by_size": [[1, 0.8], [2, 0.8], [3, 0.8], [12, 1.0]],
        "size_by_coverage": [[0.95, 12], [0.98, 12], [0.99, 12]],
    }


def test_the_least_size_has_room_for_the_special_tokens(tmp_path: Path) -> None:
    rows = [{"split": "train", "input_ids": [7] * 10, "span_starts": [0], "span_ends": [10]}]
    # 1, 2 and 7 are kept in any case, so that no vocabulary is smaller, though one token covers everything.
    assert Bench(tmp_path, rows, [1, 2, 7]).run(4)[1]["size_by_coverage"] == [[0.95, 3], [0.98, 3], [0.99, 3]]


@pytest.mark.parametrize("size", [None, 12])
def test_the_whole_vocabulary_is_the_identity(tmp_path: Path, size: int | None) -> None:
    tensors, report = Bench(tmp_path, [ROW], [1]).run(size)
    assert tensors["d2t"].tolist() == [0] * 12
    assert tensors["t2d"].all()
    assert report["coverage"] == 1.0


def test_it_follows_the_data(tmp_path: Path) -> None:
    before, _ = Bench(tmp_path, [ROW], []).run(2)
    after, _ = Bench(tmp_path, [ROW | {"input_ids": [8] * 7}], []).run(2)
    assert before["d2t"].tolist() != after["d2t"].tolist()


def test_a_draft_that_training_goes_on_from_brings_its_vocabulary(tmp_path: Path) -> None:
    """Tokens 2, 7, 9 and 11, whatever is frequent here; a special token that it lacks cannot be kept."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    save_file({"d2t": np.asarray([2, 6, 7, 8], dtype=np.int64)}, str(source / "model.safetensors"))
    tensors, report = Bench(tmp_path, [ROW], [1, 11]).run(3, source)
    assert tensors["d2t"].tolist() == [2, 6, 7, 8]
    assert tensors["t2d"].nonzero()[0].tolist() == [2, 7, 9, 11]
    assert (report["size"], report["padded"], report["kept_special"]) == (4, 0, [11])


def test_sentences(tmp_path: Path) -> None:
    with pytest.raises(
        DraftsmithError, match=r"vocabulary\.size is 32000, but the target's vocabulary has only 12 tokens"
    ):
        Bench(tmp_path, [ROW], []).run(32000)
    with pytest.raises(DraftsmithError, match="holds token id 9, but the target's vocabulary has 8"):
        Bench(tmp_path, [ROW], [], total=8).run(4)
    with pytest.raises(DraftsmithError, match="no token of a training row is supervised"):
        Bench(tmp_path, [ROW | {"split": "validation"}], []).run(4)
    (tmp_path / "rows.parquet").unlink()
    with pytest.raises(DraftsmithError, match=r"rows\.parquet: no such file; run the stage tokenize first"):
        map_vocabulary.count_supervised(tmp_path / "rows.parquet", 8)
