"""A file of conversations that is edited, from tokenize to the states of vLLM's real engine on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import AutoModelForCausalLM

import tiny
from draftsmith import extract_shard, store, tokenize
from draftsmith.config import parse
from draftsmith.files import write_json
from extraction import settings, worst_error


def _talk(asked: str, told: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": told}]}


def _states(folder: Path, model: Path, rows: list[dict[str, Any]]) -> tuple[dict[str, Any], pd.DataFrame]:
    """The manifest of one shard, and the rows that tokenize made."""
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_json(folder / "target.json", tiny.target(model))
    given = {"sources": [{"path": str(folder / "data.jsonl")}]}
    kept = {"evaluation_per_domain": 0, "validation_fraction": 0.0}
    tokenize.run(
        parse({"data": given, "tokenize": kept}, "test"), target=folder / "target.json", conversations=None,
        rows=folder / "rows.parquet", prompts=folder / "prompts.jsonl", report=folder / "tokenize.json", workdir=folder / "work",
    )  # fmt: skip
    extract_shard.run(
        settings(folder), target=folder / "target.json", rows=folder / "rows.parquet", scatteritem="1-of-1", gpus=None,
        manifest=folder / "manifest.json",
    )  # fmt: skip
    return json.loads((folder / "manifest.json").read_text()), pd.read_parquet(folder / "rows.parquet")


def test_edited_inserted_and_reordered_conversations(tmp_path: Path) -> None:
    """One row edited in place, one put on top: two rows are computed. The file turned round: none, and no engine starts."""
    model = tiny.model(tmp_path / "llama")
    rows = [_talk(f"What is {number} and {number}?", f"It is {2 * number}, of course.") for number in range(10)]
    _states(tmp_path, model, rows)
    changed = [_talk("And now?", "Now comes this."), *rows[:4], _talk("What is 4 and 4?", "Eight!"), *rows[5:]]
    manifest, table = _states(tmp_path, model, changed)
    new = [0, 5]
    assert manifest["figures"]["reused_rows"] == 9
    assert manifest["figures"]["tokens"] == sum(table.length[new])
    files = {path.name for path in Path(manifest["store"]).glob("*.safetensors")}
    assert store.batch_name(list(table.row_id[new])) in files
    manifest, table = _states(tmp_path, model, changed[::-1])
    assert manifest["figures"]["reused_rows"] == 11
    assert {path.name for path in Path(manifest["store"]).glob("*.safetensors")} == files
    assert list(manifest["rows"]) == list(table.row_id)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert worst_error(reference, manifest, [list(map(int, row)) for row in table.input_ids]) <= 1e-5
