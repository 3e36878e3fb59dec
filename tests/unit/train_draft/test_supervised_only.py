"""Rows that end with their last supervised token train the same draft as the whole rows, to the last digit."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from batch_bytes import batch_bytes
from draftsmith import store
from draftsmith.errors import DraftsmithError
from draftsmith.extract_shard.plan import stored_rows
from draftsmith.files import read_json, write_json


def end_earlier(folder: Path) -> None:
    """Let the answers end 0 to 4 tokens before the rows do, and every third row have two."""
    table = pd.read_parquet(folder / "rows.parquet")
    ends = [length - number % 5 for number, length in enumerate(table["length"])]
    starts = list(table["length"] // 2)
    two = [number % 3 == 0 for number in range(len(table))]
    table["span_starts"] = [np.array([2, start] if both else [start]) for start, both in zip(starts, two, strict=True)]
    table["span_ends"] = [np.array([6, end] if both else [end]) for end, both in zip(ends, two, strict=True)]
    table.to_parquet(folder / "rows.parquet")


def cut_store(folder: Path) -> dict[str, Any]:
    """Write the store that an extraction with supervised_only leaves; its manifest."""
    manifest: dict[str, Any] = read_json(folder / "manifest.json")
    reader = store.StoreReader(Path(manifest["store"]), manifest["rows"])
    cut = stored_rows(folder / "rows.parquet", supervised_only=True)
    whole = [reader.row(row) for row in cut]
    parts = [slice(0, row.length) for row in cut.values()]
    starts = list(accumulate((row.length for row in cut.values()), initial=0))
    tensors = {
        "aux": torch.cat([row.aux[part] for row, part in zip(whole, parts, strict=True)]),
        "final": torch.cat([row.final[part] for row, part in zip(whole, parts, strict=True)]),
        "token_ids": torch.cat([row.token_ids[part] for row, part in zip(whole, parts, strict=True)]),
        "offsets": torch.tensor(starts),
    }
    header = store.BatchHeader(
        fingerprint=manifest["fingerprint"], target="tiny", layers=manifest["layers"], dtype="float32", hidden_size=manifest["hidden_size"],
        rows=[row.row_id for row in cut.values()], lengths=[row.length for row in cut.values()],
        checksums=[store.checksum(*store.row_parts(tensors, slice(start, end))) for start, end in pairwise(starts)], vllm="0",
    )  # fmt: skip
    name = store.batch_name(header.rows)
    (folder / "cut").mkdir()
    (folder / "cut" / name).write_bytes(batch_bytes(header, tensors))
    rows = {row: [name, place] for place, row in enumerate(cut)}
    return manifest | {"store": str(folder / "cut"), "rows": rows, "supervised_only": True}


def test_the_same_draft_to_the_last_digit(make_run: Callable[..., Any]) -> None:
    run = make_run()
    end_earlier(run.folder)
    whole = run.train()
    manifest = cut_store(run.folder)
    lengths = {row: entry.length for row, entry in stored_rows(run.folder / "rows.parquet", True).items()}
    table = pd.read_parquet(run.folder / "rows.parquet")
    assert sum(table["length"]) - sum(lengths.values()) == sum(number % 5 for number in range(19))
    write_json(run.folder / "manifest.json", manifest)
    cut = run.train(out="cut-out", workdir="cut-work")
    timed = {"seconds", "tokens_per_second", "waited_for_data", "best"}
    assert json.dumps([{k: v for k, v in entry.items() if k not in timed} for entry in cut["history"]]) == json.dumps(
        [{k: v for k, v in entry.items() if k not in timed} for entry in whole["history"]]
    )
    assert any("eval_loss" in entry for entry in cut["history"])
    assert {k: v for k, v in cut.items() if k not in timed | {"history"}} == {
        k: v for k, v in whole.items() if k not in timed | {"history"}
    }
    weights, expected = (load_file(run.folder / out / "draft.safetensors") for out in ("cut-out", "out"))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_shorter_states_are_refused_unless_the_manifest_says_so(make_run: Callable[..., Any]) -> None:
    run = make_run()
    end_earlier(run.folder)
    write_json(run.folder / "manifest.json", cut_store(run.folder) | {"supervised_only": False})
    with pytest.raises(DraftsmithError, match=r"has (\d+) tokens in rows\.parquet, and \d+ instead of \1 in the store"):
        run.train()


def test_whole_states_are_refused_where_the_manifest_says_cut(make_run: Callable[..., Any]) -> None:
    run = make_run()
    end_earlier(run.folder)
    write_json(run.folder / "manifest.json", read_json(run.folder / "manifest.json") | {"supervised_only": True})
    with pytest.raises(DraftsmithError, match=r"has (\d+) tokens in rows\.parquet, and \1 instead of \d+ in the store"):
        run.train()
