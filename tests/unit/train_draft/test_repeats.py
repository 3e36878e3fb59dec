"""Rows of a heavier source are taken more often, from the same states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd


def test_training_takes_rows_as_often_as_their_weight_says(make_run: Callable[..., Any]) -> None:
    run = make_run()
    path = run.folder / "rows.parquet"
    table = pd.read_parquet(path)
    lengths = table[table["split"] == "train"]["length"].tolist()
    once = run.train(epochs=1)
    # A file without the column, as another maker writes it, and one of ones are the same training.
    table.assign(repeats=1).to_parquet(path)
    assert run.train(out="ones", epochs=1)["fingerprint"] == once["fingerprint"]
    repeats = [3 if split == "train" and place % 4 == 0 else 1 for place, split in enumerate(table["split"])]
    table.assign(repeats=repeats).to_parquet(path)
    often = run.train(out="often", epochs=1)
    assert often["fingerprint"] != once["fingerprint"]
    per_pass = sum(
        length * times
        for length, times, split in zip(table["length"], repeats, table["split"], strict=True)
        if split == "train"
    )
    assert once["tokens"] == sum(lengths)
    assert often["tokens"] == per_pass
    # Every step is one pack of at most 64 tokens; how full they are is told.
    assert often["packing"] == {
        "pack_tokens": 64,
        "packs": often["steps"],
        "fill": round(per_pass / (64 * often["steps"]), 4),
        "packs_per_pass": float(often["steps"]),
    }
