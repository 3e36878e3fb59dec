"""The storage options with vLLM's real engine on the CPU: what they store, against whole rows in the target's own precision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import tiny
from draftsmith import extract_shard, store
from extraction import extract, reader, relative, rows_of, settings


def test_float8_of_rows_that_end_with_their_answer(tmp_path: Path) -> None:
    """Rows of 40, 130 and 300 tokens that lose 0, 3 and 150 of them; each stored state is off by a few hundredths at most."""
    model = tiny.model(tmp_path / "model")
    rows, ends = rows_of([40, 130, 300]), [40, 127, 150]
    whole = reader(extract(tmp_path / "whole", model, rows))
    config = settings(tmp_path / "whole", extract={"storage": "fp8", "supervised_only": True})
    manifest = cut(tmp_path / "whole", rows, ends, config)
    assert (manifest["storage"], manifest["dtype"], manifest["supervised_only"]) == ("fp8", "float32", True)
    states = reader(manifest)
    for row, end in zip(rows, ends, strict=True):
        name = store.row_id(row)
        stored, expected = states.row(name), whole.row(name)
        assert stored.token_ids.tolist() == row[:end]
        assert stored.aux.dtype == stored.final.dtype == torch.float32
        for place in range(3):
            assert 0.01 < relative(stored.aux[:, place], expected.aux[:end, place]) < 0.04
        assert 0.01 < relative(stored.final, expected.final[:end]) < 0.04
    # Everything is there: neither the engine nor the disk is asked again.
    assert cut(tmp_path / "whole", rows, ends, config)["figures"]["reused_rows"] == 3


def cut(folder: Path, rows: list[list[int]], ends: list[int], config: Any) -> dict[str, Any]:
    """Run the stage on rows whose answers end there; its manifest."""
    table = pd.read_parquet(folder / "rows.parquet")
    table["span_ends"] = [np.array([end], dtype=np.int32) for end in ends]
    table.to_parquet(folder / "rows.parquet")
    extract_shard.run(
        config, target=folder / "target.json", rows=folder / "rows.parquet", scatteritem="1-of-1", gpus=None, manifest=folder / "cut.json"
    )  # fmt: skip
    return dict(json.loads((folder / "cut.json").read_text()))
