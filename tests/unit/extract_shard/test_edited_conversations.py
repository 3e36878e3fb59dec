"""From a file of conversations to states: what changes in the file decides which rows are computed, and nothing else does.

Tokenize and extraction are the stages as they are; the engine only writes down what it is asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_recomputes import TARGET, Runs

from draftsmith import extract_shard, merge_manifest, store
from draftsmith.config import parse
from draftsmith.extract_shard import driver
from draftsmith.files import read_json, write_json
from tokenize_bench import Bench, conversation, many

ROWS = many(30, domain="x")
NEW = conversation("something new", "The answer", id="new", domain="x")


class Workflow:
    """The two stages in a folder, again and again."""

    def __init__(self, folder: Path) -> None:
        self.bench, self.runs = Bench(folder / "tokenize"), Runs(folder)
        self.bench.workdir = folder / "work"
        (folder / "target").mkdir()
        save_file({"lm_head.weight": torch.ones(4, 4)}, folder / "target" / "model.safetensors")
        write_json(folder / "target.json", TARGET | {"path": str(folder / "target")})
        self.folder, self.report = folder, {}

    def run(self, rows: list[dict[str, Any]], shards: int = 2, **settings: Any) -> list[str]:
        """Both stages on ``rows``; the texts that the engine was asked for, sorted. Every state is looked at."""
        self.runs.asked = []
        self.report = self.bench.run(rows, **settings)
        config = parse(
            {
                "target": {"layers": [1, 3, 5]}, "engine": {"device": "cpu"},
                "extract": {"store": str(self.folder / "store"), "batch_tokens": 64},
            },
            "test",
        )  # fmt: skip
        table, manifests = self.bench.folder / "out" / "rows.parquet", []
        for place in range(1, shards + 1):
            manifests.append(self.folder / f"{place}-of-{shards}.json")
            extract_shard.run(
                config, target=self.folder / "target.json", rows=table, scatteritem=f"{place}-of-{shards}", gpus=None, manifest=manifests[-1]
            )  # fmt: skip
        merge_manifest.run(rows=table, shards=manifests, manifest=self.folder / "manifest.json")
        manifest = read_json(self.folder / "manifest.json")
        reader = store.StoreReader(Path(manifest["store"]), manifest["rows"], manifest["fingerprint"])
        written = self.bench.rows
        assert list(manifest["rows"]) == list(written.row_id)
        for row in written.itertuples():
            assert reader.row(row.row_id).token_ids.tolist() == list(row.input_ids)
        return sorted(self.bench.tokenizer.decode(ids) for ids in self.runs.asked)


def text(asked: str, told: str) -> str:
    return f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n{told}<|im_end|>"


@pytest.fixture
def workflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workflow:
    """After a first run on ROWS."""
    made = Workflow(tmp_path)
    monkeypatch.setattr(driver, "extract", made.runs.extract)
    assert made.run(ROWS) == sorted(text(f"what is {number}", f"The answer is {number}") for number in range(30))
    return made


def test_the_same_file(workflow: Workflow) -> None:
    assert workflow.run(ROWS, shards=3) == []
    assert workflow.report["made"] == 0


def test_a_row_edited_in_place(workflow: Workflow) -> None:
    edited = [*ROWS[:11], conversation("what is 11", "It is it", id="c11", domain="x"), *ROWS[12:]]
    assert workflow.run(edited) == [text("what is 11", "It is it")]
    assert workflow.report["made"] == 1
    # Back to what it was: the former states are there still.
    assert workflow.run(ROWS) == []


def test_a_row_inserted_at_the_top(workflow: Workflow) -> None:
    assert workflow.run([NEW, *ROWS]) == [text("something new", "The answer")]
    assert workflow.report["made"] == 1


def test_a_reordered_file(workflow: Workflow) -> None:
    before = list(workflow.bench.rows.row_id)
    assert workflow.run(ROWS[::2] + ROWS[1::2][::-1]) == []
    assert workflow.report["made"] == 0
    after = list(workflow.bench.rows.row_id)
    assert before != after
    assert sorted(before) == sorted(after)


def test_a_row_taken_out(workflow: Workflow) -> None:
    assert workflow.run(ROWS[1:]) == []
    assert len(workflow.bench.rows) == 29


def test_all_of_it_at_once_in_another_number_of_shards(workflow: Workflow) -> None:
    edited = [conversation("what is 3", "It is it", id="c3", domain="x"), NEW, *ROWS[:3][::-1], *ROWS[4:20], *ROWS[21:]]
    assert workflow.run(edited, shards=3) == sorted(
        [text("what is 3", "It is it"), text("something new", "The answer")]
    )


def test_a_row_that_moves_others_to_another_side(workflow: Workflow) -> None:
    """Of what trains and validates, exactly the rows without states are computed, whichever prompts are kept."""
    settings: dict[str, Any] = {"evaluation_per_domain": 4, "validation_fraction": 0.2}
    rows = [conversation(f"say {number}", "no", id=f"n{number}", domain="y") for number in range(12)]
    first = set(workflow.run(rows, **settings))
    assert len(first) == 8
    had = set(workflow.bench.rows.row_id)
    more = [conversation(f"more {number}", "no", id=f"m{number}", domain="y") for number in range(3)]
    second = workflow.run([*more, *rows], **settings)
    assert len(second) == len(set(workflow.bench.rows.row_id) - had)
    assert not first & set(second)
    assert workflow.report["made"] == 3
