"""Shared by the tests that run vLLM for real: rows, a call of the stage, and Hugging Face's states to compare with."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import tiny
from draftsmith import extract_shard, store
from draftsmith.config import Config, parse


def rows_of(lengths: Sequence[int], seed: int = 0, vocabulary: int = 259) -> list[list[int]]:
    """Random rows of these lengths; token 3 to the last, so that none is special."""
    random.seed(seed)
    return [[random.randint(3, vocabulary - 1) for _ in range(length)] for length in lengths]


def write_rows(path: Path, rows: Sequence[Sequence[int]]) -> None:
    """rows.parquet with the columns that extraction reads."""
    pd.DataFrame(
        {
            "row_id": [store.row_id(row) for row in rows],
            "input_ids": [np.array(row, dtype=np.int32) for row in rows],
            "length": [len(row) for row in rows],
        }
    ).to_parquet(path)


def settings(folder: Path, **sections: Any) -> Config:
    """A config for tiny models: forced chunked prefill, small batches."""
    engine = {"max_num_batched_tokens": 64, "max_num_seqs": 16, "kv_cache_gib": 0.1} | sections.pop("engine", {})
    extract = {"store": str(folder / "store"), "batch_tokens": 256} | sections.pop("extract", {})
    target = {"layers": [1, 3, 5]} | {k: v for k, v in sections.pop("target", {}).items() if v is not None}
    return parse({"target": target, "engine": engine, "extract": extract, **sections}, "test")


def extract(
    folder: Path,
    model: Path,
    rows: Sequence[Sequence[int]],
    layers: list[int] | None = None,
    config: Config | None = None,
    shard: str = "1-of-1",
    described: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Run the stage in this process and return its manifest; ``described`` is target.json's content, if not the model's own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "target.json").write_text(json.dumps(described or tiny.target(model)))
    write_rows(folder / "rows.parquet", rows)
    manifest = folder / f"{shard}.json"
    extract_shard.run(
        config or settings(folder, target={"layers": layers}),
        target=folder / "target.json",
        rows=folder / "rows.parquet",
        scatteritem=shard,
        gpus=None,
        manifest=manifest,
    )
    return dict(json.loads(manifest.read_text()))


def reader(manifest: dict[str, Any]) -> store.StoreReader:
    """The store as training reads it."""
    return store.StoreReader(Path(manifest["store"]), manifest["rows"])


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """|a - b| / |b|, in float32."""
    return float((a.float() - b.float()).norm() / b.float().norm())


def hidden_states(model: Any, rows: Sequence[Sequence[int]]) -> list[tuple[torch.Tensor, ...]]:
    """Hugging Face's hidden_states of each row alone, each [L, H]: the embeddings, what enters layer 1 …, the final state."""
    with torch.no_grad():
        return [
            tuple(state[0] for state in model(torch.tensor([list(row)]), output_hidden_states=True, use_cache=False).hidden_states)
            for row in rows
        ]  # fmt: skip


def worst_difference(
    expected: Sequence[tuple[torch.Tensor, ...]], manifest: dict[str, Any], rows: Sequence[Sequence[int]]
) -> float:
    """The largest relative error of any stored state of any row against ``expected``, as :func:`hidden_states` gives it."""
    states, worst = reader(manifest), 0.0
    for row, hidden in zip(rows, expected, strict=True):
        stored = states.row(store.row_id(row))
        assert stored.token_ids.tolist() == list(row)
        for place, layer in enumerate(manifest["layers"]):
            worst = max(worst, relative(stored.aux[:, place], hidden[layer]))
        worst = max(worst, relative(stored.final, hidden[-1]))
    return worst


def worst_error(model: Any, manifest: dict[str, Any], rows: Sequence[Sequence[int]]) -> float:
    """The largest relative error of any stored state of any row against Hugging Face's hidden_states."""
    return worst_difference(hidden_states(model, rows), manifest, rows)
