"""Each check fails for what it is there for, in words that name the key and the mend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from draftsmith import hardware, preflight, store
from draftsmith.config import parse
from draftsmith.errors import DraftsmithError
from draftsmith.preflight.checks import before_regeneration
from draftsmith.preflight.dry_run import shrunk

TARGET: dict[str, Any] = {
    "source": "x", "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_layers": 6, "hidden_size": 64, "vocab_size": 320,
    "max_positions": 1024, "torch_dtype": "float32", "fingerprint": "f" * 64, "multimodal": False,
}  # fmt: skip


def check(
    tmp_path: Path, rows: list[list[int]] | None = None, settings: dict[str, Any] | None = None, **target: Any
) -> dict[str, Any]:
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 6}))
    (tmp_path / "target.json").write_text(json.dumps(TARGET | {"path": str(folder)} | target))
    rows = rows or [[1, 2, 3], [4, 5]]
    table = {
        "row_id": [store.row_id(row) for row in rows],
        "input_ids": [np.array(row, dtype=np.int32) for row in rows],
        "length": list(map(len, rows)),
    }
    pd.DataFrame(table).to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "tokenize.json").write_text(json.dumps({"tokens": 10, "supervised": 4}))
    values = {
        "engine": {"device": "cpu"},
        "preflight": {"dry_run": False},
        "extract": {"store": str(tmp_path / "store")},
        "target": {"layers": [1, 3, 5]},
    } | (settings or {})
    preflight.run(
        parse(values, "test"), target=tmp_path / "target.json", rows=tmp_path / "rows.parquet", tokenize_report=tmp_path / "tokenize.json",
        gpus=0, report=tmp_path / "preflight.json",
    )  # fmt: skip
    return {entry["name"]: entry for entry in json.loads((tmp_path / "preflight.json").read_text())["checks"]}


def test_a_sound_run_passes(tmp_path: Path) -> None:
    checks = check(tmp_path)
    assert {entry["status"] for entry in checks.values()} == {"ok"}
    assert checks["store"]["detail"].endswith("GB free")
    assert "0 of 2 rows are there" in checks["store"]["detail"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"rows": [[1] * 1023]},
            r"the longest row has 1023 tokens, the target has 1024 positions; lower tokenize\.max_length to 1022",
        ),
        ({"rows": [[1, 320]]}, r"has token 320, the model's vocabulary ends at 319"),
        (
            {"model_type": "deepseek_v3", "settings": {"target": {"dtype": "float16", "layers": [1, 3, 5]}}},
            r"target\.dtype float16 .*set it to bfloat16",
        ),
        ({"settings": {"target": {"layers": [1, 3, 7]}}}, r"target\.layers: \[7\] lie outside"),
        ({"settings": {"engine": {"tp": 8}}}, r"engine\.tp is 8, but this job was granted 0 GPU"),
    ],
)
def test_what_cannot_work_is_told_before_a_load(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(DraftsmithError, match=said):
        check(tmp_path, **changes)
    assert not (tmp_path / "preflight.json").exists()


def test_a_store_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DraftsmithError, match=r"file/store: cannot be written .*extract\.store"):
        check(tmp_path, settings={"extract": {"store": str(tmp_path / "file/store")}})


def test_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100})())
    with pytest.raises(DraftsmithError, match=r"store: .*0 of 2 rows are there"):
        check(tmp_path)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"target": {"layers": [1, 3, 99]}}, r"target\.layers: \[99\] lie outside"),
        ({"vocabulary": {"size": 321}}, r"vocabulary\.size is 321, the target has 320 tokens"),
        ({"extract": {"store": "/proc/nope/store"}}, r"/proc/nope/store: cannot be written .*extract\.store"),
    ],
)
def test_what_needs_no_rows_is_told_before_they_are_generated(settings: dict[str, Any], said: str) -> None:
    values = {"target": {"layers": [1, 3, 5]}, "vocabulary": {"size": 100}} | settings
    with pytest.raises(DraftsmithError, match=said):
        before_regeneration(parse(values, "test"), TARGET)


def test_the_dry_run_is_the_same_model_with_few_layers(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"text_config": {"num_hidden_layers": 61, "layer_types": ["full", "linear"] * 30 + ["full"]}})
    )
    target = TARGET | {"path": str(folder), "num_layers": 61, "layers": [2, 30, 58]}
    config, small = shrunk(
        parse({"engine": {"tp": 8, "args": {"quantization": "x"}}}, "test"), target, tmp_path / "store"
    )
    assert config.engine.tp == 8
    assert config.engine.args == {
        "quantization": "x",
        "load_format": "dummy",
        "hf_overrides": {"text_config": {"num_hidden_layers": 4, "layer_types": ["full", "linear", "full", "linear"]}},
    }
    assert (small["num_layers"], config.target.layers) == (4, [1, 2, 3])
    assert hardware.device() in ("cpu", "cuda")
