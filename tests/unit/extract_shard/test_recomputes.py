"""What a change computes again: the stage as a whole, with an engine that only writes down what it is asked for."""

from __future__ import annotations

import errno
import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

from draftsmith import extract_shard, merge_manifest, store
from draftsmith.config import parse
from draftsmith.errors import DraftsmithError
from draftsmith.extract_shard import driver, plan
from draftsmith.extract_shard.staging import staging
from draftsmith.files import read_json, write_json
from draftsmith.store import format as store_format
from draftsmith.store import head as store_head

ROWS = [[number, *range(number % 5 + 2)] for number in range(23)]
TARGET = {
    "fingerprint": "revision-1",
    "states_fingerprint": "states-1",
    "torch_dtype": "float32",
    "hidden_size": 4,
    "num_layers": 6,
}


def batch_file(job: driver.Job, row: plan.PlannedRow, folder: Path) -> Path:
    """The batch file of one row in ``folder``, with states of ones."""
    dtype, storage = job.stored
    header = store.BatchHeader(
        fingerprint=job.fingerprint, target=job.target["fingerprint"], layers=job.target["layers"], dtype=dtype, storage=storage,
        hidden_size=4, rows=[row.row_id], lengths=[row.length], checksums=["0" * 16], vllm="0",
    )  # fmt: skip
    head, places = store.layout(header)
    content = torch.zeros(max(at + size for at, size in places.values()), dtype=torch.uint8)
    views = store.tensors(header, places, lambda at, size: content[at : at + size])
    for view in views.values():
        view.copy_(torch.ones_like(view, dtype=torch.float32))
    views["offsets"].copy_(torch.tensor(list(accumulate(header.lengths, initial=0))))
    views["token_ids"].copy_(torch.tensor(job.tokens[row.row_id]))
    header.checksums = [store.checksum(*store.row_parts(views, slice(0, row.length)))]
    head, _ = store.layout(header)
    content[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    path = folder / store.batch_name(header.rows)
    path.write_bytes(content.numpy().tobytes())
    return path


def publish(job: driver.Job) -> None:
    """One batch file for each row that is asked for."""
    for row in job.rows:
        store.Journal(job.folder).add(batch_file(job, row, job.folder))


@dataclass
class Runs:
    """A folder in which the stage is run again and again."""

    folder: Path
    asked: list[list[int]] = field(default_factory=list)

    def extract(self, job: driver.Job, *_: Any) -> driver.Outcome:
        """Stands in for the engine."""
        self.asked += [job.tokens[row.row_id] for row in job.rows]
        publish(job)
        return driver.Outcome(figures={"batches": len(job.rows)})

    def run(
        self, rows: Sequence[list[int]] = ROWS, shards: int = 1, described: dict[str, Any] | None = None,
        ends: Sequence[int] | None = None, **settings: Any,
    ) -> list[list[int]]:  # fmt: skip
        """Run all shards and merge them; the rows that the engine was asked for, in order."""
        self.asked = []
        table = {
            "row_id": [store.row_id(row) for row in rows],
            "length": [len(row) for row in rows],
            "input_ids": [np.array(row, dtype=np.int32) for row in rows],
            "span_starts": [np.array([0], dtype=np.int32) for _ in rows],
            "span_ends": [np.array([end], dtype=np.int32) for end in ends or map(len, rows)],
        }
        pd.DataFrame(table).to_parquet(self.folder / "rows.parquet")
        write_json(self.folder / "target.json", TARGET | {"path": str(self.folder / "target")} | (described or {}))
        values: dict[str, Any] = {
            "target": {"layers": [1, 3, 5]},
            "engine": {"device": "cpu"},
            "extract": {"store": str(self.folder / "store"), "batch_tokens": 16},
        }
        for section, keys in settings.items():
            values[section] = values.get(section, {}) | keys
        manifests = []
        for place in range(1, shards + 1):
            manifests.append(self.folder / f"{place}-of-{shards}.json")
            extract_shard.run(
                parse(values, "test"), target=self.folder / "target.json", rows=self.folder / "rows.parquet",
                scatteritem=f"{place}-of-{shards}", gpus=None, manifest=manifests[-1],
            )  # fmt: skip
        merge_manifest.run(rows=self.folder / "rows.parquet", shards=manifests, manifest=self.folder / "manifest.json")
        return sorted(self.asked)

    def states(self) -> dict[str, list[int]]:
        """Token ids of the states of each row of the merged manifest."""
        manifest = read_json(self.folder / "manifest.json")
        reader = store.StoreReader(Path(manifest["store"]), manifest["rows"], manifest["fingerprint"])
        return {row: reader.row(row).token_ids.tolist() for row in manifest["rows"]}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """After a first run, which has extracted everything."""
    made = Runs(tmp_path)
    (tmp_path / "target").mkdir()
    save_file({"lm_head.weight": torch.ones(4, 4)}, tmp_path / "target" / "model.safetensors")
    monkeypatch.setattr(driver, "extract", made.extract)
    assert made.run(shards=2) == sorted(ROWS)
    return made


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_another_number_of_shards_recomputes_nothing(runs: Runs, shards: int) -> None:
    assert runs.run(shards=shards) == []
    assert runs.states() == {store.row_id(row): row for row in ROWS}


def test_a_row_that_failed_here_and_was_published_meanwhile_counts_as_published(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another process on the same store; a row in both lists would be refused by the merge."""
    new = [[77, 78], [88, 89]]

    def failing(job: driver.Job, *_: Any) -> driver.Outcome:
        publish(job)
        entry = {"type": "ValueError", "message": "", "traceback": ""}
        return driver.Outcome(figures={"batches": 0}, failed={job.rows[0].row_id: entry})

    monkeypatch.setattr(driver, "extract", failing)
    runs.run([*ROWS, *new])
    manifest = read_json(runs.folder / "manifest.json")
    assert manifest["failed"] == []
    assert set(manifest["rows"]) == {store.row_id(row) for row in [*ROWS, *new]}


def test_another_host_recomputes_nothing(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    assert runs.run() == []


@pytest.mark.parametrize(
    "settings",
    [
        {"engine": {"tp": 8}},
        {"engine": {"max_num_seqs": 1, "max_num_batched_tokens": 128, "enforce_eager": False, "kv_cache_gib": 1.0}},
        {"extract": {"batch_tokens": 5, "writer_threads": 3, "max_tries": 1}},
        {"train": {"epochs": 1}},
    ],
)
def test_how_it_is_extracted_recomputes_nothing(runs: Runs, settings: dict[str, Any]) -> None:
    assert runs.run(**settings) == []


def test_a_changed_row_is_computed_again_and_no_other(runs: Runs) -> None:
    changed = [*ROWS[:7], [*ROWS[7][:-1], 99], *ROWS[8:]]
    assert runs.run(changed, shards=3) == [changed[7]]
    assert runs.run(ROWS, shards=2) == []


def test_rows_in_another_order_recompute_nothing_and_a_new_one_itself(runs: Runs) -> None:
    assert runs.run([[77, 78], *ROWS[::-1]], shards=2) == [[77, 78]]


def test_another_template_computes_the_rows_that_it_changes(runs: Runs) -> None:
    """It puts a token in front of those with an even first one, say."""
    templated = [[50, *row] if row[0] % 2 == 0 else row for row in ROWS]
    assert runs.run(templated) == sorted(row for row in templated if row[0] == 50)


@pytest.mark.parametrize(
    "change",
    [
        {"described": {"states_fingerprint": "revision-2"}},
        {"described": {"states_fingerprint": None, "fingerprint": "of-an-older-version"}},
        {"target": {"dtype": "bfloat16"}},
        {"target": {"layers": [1, 3, 4]}},
        {"extract": {"storage": "bf16"}},
        {"extract": {"storage": "fp8"}},
        {"engine": {"args": {"quantization": "fp8"}}},
    ],
)
def test_what_changes_every_state_computes_every_row_again_and_keeps_the_old_ones(
    runs: Runs, change: dict[str, Any]
) -> None:
    assert runs.run(shards=2, **change) == sorted(ROWS)
    assert runs.states() == {store.row_id(row): row for row in ROWS}
    assert len(list((runs.folder / "store").iterdir())) == 2
    # And back again.
    assert runs.run() == []


@pytest.fixture
def read_only(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """The same, and now no file can be made anywhere."""

    def refuse(path: Path, *_: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "touch", refuse)
    return runs


def test_a_store_that_cannot_be_written_is_read(read_only: Runs) -> None:
    assert read_only.run() == []
    assert read_only.states() == {store.row_id(row): row for row in ROWS}


def test_a_store_that_cannot_be_written_and_lacks_a_row(read_only: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told before anything is verified."""
    monkeypatch.setattr(store, "trusted", lambda *_: pytest.fail("reads first"))
    (folder,) = (read_only.folder / "store").iterdir()
    with pytest.raises(DraftsmithError) as error:
        read_only.run([*ROWS, [77, 78]])
    assert str(error.value) == (
        f"{folder}: cannot be written (Read-only file system); name another folder in the config key extract.store"
    )


def test_a_store_that_cannot_be_written_and_has_a_damaged_file(read_only: Runs) -> None:
    path = next((read_only.folder / "store").glob("*/*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DraftsmithError, match="cannot be written"):
        read_only.run()


def test_a_file_in_the_place_of_the_fingerprints_folder(runs: Runs) -> None:
    (folder,) = (runs.folder / "store").iterdir()
    shutil.rmtree(folder)
    folder.write_text("")
    with pytest.raises(
        DraftsmithError, match=rf"{folder.name}: cannot be written \(File exists\); name another folder"
    ):
        runs.run()


def test_another_tokenizer_or_template_alone_computes_nothing_again(runs: Runs) -> None:
    """Rows are known by their tokens, whatever made them."""
    assert runs.run(shards=2, described={"fingerprint": "another-template"}) == []


def test_another_format_computes_every_row_again(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (store, store_format, store_head):
        monkeypatch.setattr(module, "FORMAT_VERSION", 3)
    monkeypatch.setattr(store.BatchHeader.model_fields["format"], "default", 3)
    store.BatchHeader.model_rebuild(force=True)
    try:
        assert runs.run(shards=2) == sorted(ROWS)
    finally:
        monkeypatch.undo()
        store.BatchHeader.model_rebuild(force=True)


def test_damaged_states_are_computed_again_and_no_others(runs: Runs) -> None:
    """Of a file that was published, and so is in the journal: its time tells that something has written to it since."""
    (folder,) = (runs.folder / "store").iterdir()
    damaged = ROWS[3]
    path = folder / store.batch_name([store.row_id(damaged)])
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert runs.run(shards=2) == [damaged]
    assert (folder / ".damaged" / path.name).read_bytes() == content
    assert runs.states() == {store.row_id(row): row for row in ROWS}


def test_supervised_only_computes_what_is_shorter_and_nothing_else(runs: Runs) -> None:
    """Rows that end with their answer are there already."""
    ends = [len(row) - (1 if number % 3 == 0 else 0) for number, row in enumerate(ROWS)]
    left = [row[:end] for row, end in zip(ROWS, ends, strict=True)]
    shorter = sorted({tuple(row) for row, end in zip(left, ends, strict=True)} - {tuple(row) for row in ROWS})
    assert runs.run(shards=2, ends=ends, extract={"supervised_only": True}) == [list(row) for row in shorter]
    assert runs.states() == {store.row_id(row): kept for row, kept in zip(ROWS, left, strict=True)}
    manifest = read_json(runs.folder / "manifest.json")
    assert manifest["supervised_only"] is True
    assert manifest["tokens"] == sum(ends)
    assert len(list((runs.folder / "store").iterdir())) == 1


def test_rows_that_differ_in_their_tails_alone_are_computed_once(runs: Runs) -> None:
    rows = [[60, 61, 62, tail] for tail in range(4)]
    assert runs.run(rows, ends=[3] * 4, extract={"supervised_only": True}) == [[60, 61, 62]]
    assert list(runs.states().values()) == [[60, 61, 62]] * 4


@pytest.mark.parametrize("count", [2, 3, 7])
def test_no_two_shards_write_a_file_of_the_same_name(count: int) -> None:
    """A file is named after its rows, and each row is one shard's."""
    every = [plan.PlannedRow(store.row_id(row), len(row)) for row in ROWS]
    shares = [plan.share(every, f"{place}-of-{count}", 8) for place in range(1, count + 1)]
    names = [store.batch_name([row.row_id for row in batch]) for share in shares for batch in plan.pack(share, 8)]
    assert len(names) >= count
    assert len(set(names)) == len(names)


def test_two_hosts_stage_their_files_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even for the same shard of two runs, by processes of the same number."""
    with staging(tmp_path, "1-of-2") as here:
        monkeypatch.setattr(socket, "gethostname", lambda: "another")
        with staging(tmp_path, "1-of-2") as there:
            assert here != there
            assert here.is_dir()
            assert there.is_dir()
