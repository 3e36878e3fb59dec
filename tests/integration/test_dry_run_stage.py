"""The dry run for real, on the CPU: the extraction itself, with few layers of dummy weights, into a store that is thrown away."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import tiny
from extraction import rows_of, settings, write_rows

INT4 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"], "input_activations": None, "output_activations": None,
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False},
        },
    },
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
}  # fmt: skip
WINDOWS = {"query_pre_attn_scalar": 32, "sliding_window": 512}


def dry_run(folder: Path, model: Path, layers: list[int], dtype: str = "auto") -> subprocess.CompletedProcess[str]:
    """The command as the rule calls it, with its log; five rows, of which it takes the four longest."""
    asked = {"layers": layers, "dtype": dtype}
    made = settings(folder, target=asked, preflight={"dry_run": True}).model_dump_json()
    (folder / "target.json").write_text(json.dumps(tiny.target(model)))
    write_rows(folder / "rows.parquet", rows_of([1, 5, 40, 300, 600]))
    return subprocess.run(
        [
            sys.executable, "-m", "draftsmith", "dry-run", "--settings", made, "--config", made, "--target", str(folder / "target.json"),
            "--rows", str(folder / "rows.parquet"), "--report", str(folder / "dry_run.json"),
        ],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "changes", "layers", "count", "how"),
    [
        ("kimi_k25", {"first_k_dense_replace": 3}, [2, 4, 7], 5, "native"),
        ("gemma3_text", WINDOWS, [0, 4, 7], 6, "hooks"),
    ],
)
def test_it_takes_the_path_of_the_whole_target(
    tmp_path: Path, kind: str, changes: dict[str, object], layers: list[int], count: int, how: str
) -> None:
    """Here Kimi's first three layers are dense, so that it needs five for its experts; Gemma's sixth sees all tokens."""
    model = tiny.model(tmp_path / "model", kind, num_hidden_layers=9, **changes)
    before = sorted(model.iterdir())
    done = dry_run(tmp_path, model, layers)
    assert done.returncode == 0, done.stderr[-6000:]
    made = json.loads((tmp_path / "dry_run.json").read_text())
    assert made["verdict"] == "ok"
    found = {check["name"]: check["detail"] for check in made["checks"]}
    assert f"with {count} of its 9 layers, dummy weights, engine.tp 1" in found["target"]
    assert found["extraction"].startswith("4 rows, 945 tokens in all, in ")
    captured = [0, count - 2, count - 1] if layers[0] == 0 else [count - 3, count - 2, count - 1]
    assert found["reading"].startswith(f"{how}, layers {captured} and the final state, on CPUModelRunner")
    assert found["store"] == "all rows were read back: 3 layers and the final state of width 64 in float32"
    assert made["figures"]["tokens"] == 945
    assert not list((tmp_path / "store").iterdir()), "nothing of it stays in the store"
    assert sorted(model.iterdir()) == before


def test_what_only_the_engine_knows_fails_here_and_not_after_the_load(tmp_path: Path) -> None:
    """Experts in INT4 as Kimi-K2.5 has them, which vLLM cannot run on a CPU: dummy weights are of the checkpoint's own kind."""
    model = tiny.model(tmp_path / "model", "kimi_k25", hidden_size=128, num_hidden_layers=9)
    settings = json.loads((model / "config.json").read_text())
    settings["text_config"]["quantization_config"] = INT4
    (model / "config.json").write_text(json.dumps(settings))
    done = dry_run(tmp_path, model, [2, 4, 7], dtype="bfloat16")
    assert done.returncode == 1
    told = done.stderr.split("dry run: what it ended with\n")[1]
    assert "Traceback (most recent call last)" in told
    assert "NotImplementedError: No WNA16 MoE backend" in told
    assert ".dry-run-" not in told, "a place that is gone"
    lines = told.splitlines()
    assert any(line.endswith("skip  store       left out: the extraction failed") for line in lines), told
    assert " error: dry run: extraction: ended after " in lines[-1]
    assert "preflight.dry_run: false" in lines[-1]
    assert json.loads((tmp_path / "failed-dry_run.json").read_text())["verdict"] == "fail"
    assert not list((tmp_path / "store").iterdir())
