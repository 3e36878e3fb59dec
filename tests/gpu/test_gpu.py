"""On an NVIDIA GPU: both of vLLM's model runners, and the whole chain. `pytest -m gpu tests/gpu`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import tiny
from chain import Run, config, conversations
from draftsmith import store
from extraction import hidden_states, reader, rows_of, settings, write_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

WIDE = {
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 512,
}  # fmt: skip
# The model runner that vLLM chooses for each.
RUNNERS = {"llama": "gpu.model_runner", "deepseek_v3": "gpu_model_runner"}
LAYERS = [1, 3, 5]
ROWS = rows_of([1, 5, 17, 300, 600])
CROWDED = rows_of([300, 290, 310, 280, 305, 295, 315, 285], seed=1)


@pytest.fixture(scope="module", params=RUNNERS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 checkpoint; dense on the V2 runner, MLA and a mixture of experts on V1."""
    folder = tmp_path_factory.mktemp("models") / request.param
    tiny.model(folder, request.param, **(WIDE | (tiny.MLA if request.param == "deepseek_v3" else {})))
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def python(*command: str) -> None:
    """In a process of its own: this one may have touched CUDA, and an engine that fails may not let go of it."""
    # What an engine in this process may have set for itself.
    own = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_RPC_BASE_PATH")
    clean = {name: value for name, value in os.environ.items() if name not in own}
    subprocess.run([sys.executable, *command], check=True, timeout=300, env=clean)


def stage(folder: Path, model: Path, rows: Sequence[Sequence[int]], **engine: Any) -> dict[str, Any]:
    """Extract with the engine's settings ``engine``; gives the manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "target.json").write_text(json.dumps(tiny.target(model)))
    write_rows(folder / "rows.parquet", rows)
    made = settings(
        folder, target={"dtype": "bfloat16", "layers": LAYERS}, engine={"gpu_memory_utilization": 0.3} | engine
    )
    python(
        "-m", "draftsmith", "extract-shard", "--settings", made.model_dump_json(), "--target", str(folder / "target.json"),
        "--rows", str(folder / "rows.parquet"), "--scatteritem", "1-of-1", "--manifest", str(folder / "manifest.json"),
    )  # fmt: skip
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    assert RUNNERS[model.name] in manifest["figures"]["runner"], manifest["figures"]
    return manifest


def stored(manifest: dict[str, Any], rows: Sequence[Sequence[int]]) -> list[list[Tensor]]:
    """States of each row: those of the layers, then the final one; each [L, H] in bfloat16."""
    found = [reader(manifest).row(store.row_id(row)) for row in rows]
    assert {row.final.dtype for row in found} == {torch.bfloat16}
    return [[*row.aux.unbind(1), row.final] for row in found]


def errors(states: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[Tensor]]) -> list[float]:
    """For each layer the relative error over all tokens of all rows."""
    pairs = [list(zip(row, wanted, strict=True)) for row, wanted in zip(states, expected, strict=True)]
    found = []
    for place in zip(*pairs, strict=True):
        apart = sum(float((a.float() - b.float()).square().sum()) for a, b in place)
        found.append((apart / sum(float(b.float().square().sum()) for _, b in place)) ** 0.5)
    return found


def reference(model: Path, rows: Sequence[Sequence[int]], dtype: torch.dtype) -> list[list[Tensor]]:
    """Hugging Face's states in ``dtype``, in the order of :func:`stored`."""
    return [[*(row[layer] for layer in LAYERS), row[-1]] for row in hidden_states(tiny.reference(model, dtype), rows)]


def within_noise(model: Path, manifest: dict[str, Any], rows: Sequence[Sequence[int]]) -> bool:
    """Whether the stored states are as far from float32 as bfloat16 makes Hugging Face's.

    A mixture of experts sends some tokens elsewhere in bfloat16, so no fixed bound would do.
    """
    exact = reference(model, rows, torch.float32)
    ours, theirs = errors(stored(manifest, rows), exact), errors(reference(model, rows, torch.bfloat16), exact)
    return all(our <= 1.5 * their for our, their in zip(ours, theirs, strict=True))


def test_states_on_both_model_runners(tmp_path: Path, model: Path) -> None:
    """bfloat16 against a float32 reference; chunked prefill, rows of 1 to 600 tokens."""
    assert within_noise(model, stage(tmp_path, model, ROWS), ROWS)


def test_the_error_is_no_larger_than_that_of_vllms_own_connector(tmp_path: Path, model: Path) -> None:
    """Of the layers alone, as the connector's last state is the one before the final norm.

    Which rows share a step is a matter of milliseconds, and with it in which way a sum is rounded; hence the margin.
    """
    rows = ROWS + CROWDED
    ours = stored(stage(tmp_path / "ours", model, rows), rows)
    made = settings(tmp_path, target={"dtype": "bfloat16"}, engine={"gpu_memory_utilization": 0.3})
    spec = {"config": made.model_dump(mode="json"), "target": tiny.target(model), "layers": LAYERS, "rows": rows}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    script = Path(__file__).with_name("connector_states.py")
    python(str(script), str(tmp_path / "spec.json"), str(tmp_path / "states.safetensors"))
    theirs = load_file(tmp_path / "states.safetensors")
    exact = [row[:-1] for row in reference(model, rows, torch.float32)]
    found = errors([row[:-1] for row in ours], exact)
    measure = errors([theirs[str(place)].unbind(1) for place in range(len(rows))], exact)
    assert all(our <= 1.05 * their for our, their in zip(found, measure, strict=True)), (found, measure)


@pytest.mark.parametrize("wanted", [True, False])
def test_asynchronous_scheduling_with_preemption(tmp_path: Path, model: Path, wanted: bool) -> None:
    """Steps are planned before the last one's end is known, and the KV cache holds two of the eight rows that run."""
    small = {"num_gpu_blocks_override": 12, "block_size": 64, "long_prefill_token_threshold": 16}
    manifest = stage(tmp_path, model, CROWDED, max_num_batched_tokens=128, args=small | {"async_scheduling": wanted})
    assert manifest["figures"]["async_scheduling"] is wanted
    assert manifest["figures"]["writer"]["restarts"] > 0
    assert within_noise(model, manifest, CROWDED)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_give_what_one_gives(tmp_path: Path, model: Path) -> None:
    one, two = (stage(tmp_path / str(tp), model, ROWS, tp=tp) for tp in (1, 2))
    assert within_noise(model, two, ROWS)
    noise = errors(stored(one, ROWS), reference(model, ROWS, torch.float32))
    apart = errors(stored(two, ROWS), stored(one, ROWS))
    # Two errors of the same size that know nothing of each other add up to 1.4 of one.
    assert all(difference <= 1.6 * error for difference, error in zip(apart, noise, strict=True)), (apart, noise)


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
