"""Every architecture against Hugging Face in float32, on one rank and on two: native interface and hooks alike.

Rows of 1 to 600 tokens go through in steps of at most 64, so that most are prefilled in chunks beside others. With MLA
vLLM's CPU backend takes rows whole; tests/gpu has it in chunks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny
from draftsmith import vllm_compat
from extraction import extract, hidden_states, rows_of, settings, worst_difference, worst_error, write_rows

LENGTHS = [1, 5, 17, 300, 600]
# How each is read. Those with hooks lack vLLM's EAGLE-3 interface; kimi_k25 and paligemma have their sizes in text_config.
METHODS = {
    "deepseek_v3": "native",
    "gemma3_text": "hooks",
    "glm4_moe": "hooks",
    "gpt_oss": "native",
    "granite": "native",
    "kimi_k25": "native",
    "llama": "native",
    "mixtral": "hooks",
    "paligemma": "hooks",
    "qwen3": "native",
    "qwen3_moe": "native",
}
WHOLE = ("deepseek_v3", "kimi_k25")


@pytest.fixture(scope="module", autouse=True)
def second_rank() -> Iterator[None]:
    """The process of rank 1; it imports vllm while the tests on one rank run."""
    import pair

    other = pair.start()
    yield
    other.end()


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ranks' engine without processes of vLLM's own."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def checked(
    folder: Path, model_type: str, classes: tuple[str, ...] = (), layers: list[int] | None = None, **engine: Any
) -> dict[str, Any]:
    """Extract with a random model and compare with Hugging Face; gives the manifest. ``classes`` are vLLM's for it."""
    model = tiny.model(folder / "model", model_type)
    # Before the engine is there, whose Transformers backend changes transformers' own classes.
    rows = rows_of(LENGTHS)
    expected = hidden_states(tiny.reference(model), rows)
    # Otherwise vLLM starts a process that imports all of it, to have a look at the class.
    for name in classes or [str(name) for name in tiny.target(model)["architectures"]]:  # type: ignore[attr-defined]
        vllm_compat.model_class([name])
    manifest = extract(folder, model, rows, config=settings(folder, target={"layers": layers}, engine=engine))
    assert worst_difference(expected, manifest, rows) <= 1e-5
    return manifest


@pytest.mark.parametrize("model_type", METHODS)
def test_states_equal_transformers(tmp_path: Path, model_type: str) -> None:
    figures = checked(tmp_path, model_type)["figures"]
    assert figures["method"] == METHODS[model_type]
    steps = figures["writer"]["steps"]
    assert steps <= len(LENGTHS) if model_type in WHOLE else steps == -(-sum(LENGTHS) // 64)


@pytest.mark.parametrize("model_type", METHODS)
@pytest.mark.usefixtures("in_this_process")
def test_states_equal_transformers_on_two_ranks(tmp_path: Path, model_type: str) -> None:
    pair = {"distributed_executor_backend": "pair.Pair"}
    manifest = checked(tmp_path, model_type, tp=2, device="cpu", args=pair)
    assert manifest["figures"]["method"] == METHODS[model_type]


def test_layer_zero_is_read_by_a_hook(tmp_path: Path) -> None:
    """Natively it would be hidden states and a residual that is not there yet."""
    manifest = checked(tmp_path, "deepseek_v3", layers=[0, 2, 5])
    assert (manifest["layers"], manifest["figures"]["method"]) == ([0, 2, 5], "hooks")


def test_compilation_is_left_out_whatever_is_asked_for(tmp_path: Path) -> None:
    """It may be asked for, for the sake of the stages that serve; compiled layers would give no states."""
    assert checked(tmp_path, "llama", enforce_eager=False)["figures"]["method"] == "native"


def test_the_transformers_backend_is_read_natively(tmp_path: Path) -> None:
    """The way out for a class of vLLM's own that cannot be read; Olmoe's is read by hooks."""
    classes = ("OlmoeForCausalLM", "TransformersMoEForCausalLM")
    manifest = checked(tmp_path, "olmoe", classes, args={"model_impl": "transformers"})
    assert manifest["figures"]["method"] == "native"


def test_two_ranks_of_vllms_own_executor(tmp_path: Path) -> None:
    """The stage as it is run, in processes of its own; everything else about two ranks is tried without them."""
    model = tiny.model(tmp_path / "model", "kimi_k25")
    rows = rows_of(LENGTHS)
    (tmp_path / "target.json").write_text(json.dumps(tiny.target(model)))
    write_rows(tmp_path / "rows.parquet", rows)
    config = settings(tmp_path, engine={"tp": 2, "device": "cpu"}).model_dump_json()
    command = [
        sys.executable, "-m", "draftsmith", "extract-shard", "--settings", config, "--target", str(tmp_path / "target.json"),
        "--rows", str(tmp_path / "rows.parquet"), "--scatteritem", "1-of-1", "--manifest", str(tmp_path / "manifest.json"),
    ]  # fmt: skip
    # An engine in this process may have set some for itself.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    done = subprocess.run(command, env=clean, timeout=600, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-8000:]
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["figures"]["method"] == "native"
    assert worst_error(tiny.reference(model), manifest, rows) <= 1e-5
