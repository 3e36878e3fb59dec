"""On an NVIDIA GPU: both of vLLM's model runners, and the whole chain. `pytest -m gpu tests/gpu`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny
from chain import Run, config, conversations
from draftsmith import store
from extraction import reader, relative, rows_of, settings, write_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

WIDE = {
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 512,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "runner", "changes"),
    [("llama", "gpu.model_runner", WIDE), ("deepseek_v3", "gpu_model_runner", WIDE | tiny.MLA)],
)
def test_states_on_both_model_runners(tmp_path: Path, model_type: str, runner: str, changes: dict[str, object]) -> None:
    """bfloat16 against a float32 reference; chunked prefill, rows of 1 to 600 tokens."""
    folder = tiny.model(tmp_path / "model", model_type, **changes)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    rows = rows_of([1, 5, 17, 300, 600])
    made = settings(tmp_path, target={"dtype": "bfloat16"}, engine={"gpu_memory_utilization": 0.3})
    # In a process of its own: this one may have touched CUDA, and an engine that fails may not let go of it.
    (tmp_path / "target.json").write_text(json.dumps(tiny.target(folder)))
    write_rows(tmp_path / "rows.parquet", rows)
    subprocess.run(
        [
            sys.executable, "-m", "draftsmith", "extract-shard", "--settings", made.model_dump_json(), "--target", str(tmp_path / "target.json"),
            "--rows", str(tmp_path / "rows.parquet"), "--scatteritem", "1-of-1", "--manifest", str(tmp_path / "manifest.json"),
        ],
        check=True, timeout=200,
    )  # fmt: skip
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert runner in manifest["figures"]["runner"], manifest["figures"]
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).float()
    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    states = reader(manifest)
    for row in rows:
        stored = states.row(store.row_id(row))
        assert stored.final.dtype == torch.bfloat16
        expected, also = hidden_states(reference, row), hidden_states(rounded, row)
        for layer, found in [*zip(manifest["layers"], stored.aux.unbind(1), strict=True), (-1, stored.final)]:
            # In bfloat16 a mixture of experts sends some tokens elsewhere; Hugging Face's own error is the measure.
            assert relative(found, expected[layer][0]) <= 1.5 * relative(also[layer][0], expected[layer][0]) + 0.01


def hidden_states(model: Any, row: list[int]) -> Any:
    with torch.no_grad():
        return model(torch.tensor([row]), output_hidden_states=True, use_cache=False).hidden_states


def test_the_chain_on_a_gpu(tmp_path: Path) -> None:
    model = tiny.model(tmp_path / "model", num_hidden_layers=4, **WIDE)
    conversations(tmp_path / "conversations.jsonl")
    run = Run(tmp_path)
    values = config(tmp_path, model)
    values["engine"] |= {"gpu_memory_utilization": 0.3}
    values["train"] |= {"ttt_steps": 3}
    run.write(values)
    run.snakemake()
    assert run.json("evaluate/evaluate.json")["drafts"] > 0
    assert run.json("preflight.json")["verdict"] == "ok"
    assert run.json("dry_run.json")["verdict"] == "ok"
