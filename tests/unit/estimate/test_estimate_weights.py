"""Weights: counted from a config as transformers builds them, and Kimi's by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from targets import KIMI, SMOLLM, folder, given

import tiny
from draftsmith.estimate import weights
from draftsmith.get_target import language_parts


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3", "qwen3_moe", "mixtral", "gemma"])
def test_parameters_are_those_that_transformers_builds(tmp_path: Path, kind: str) -> None:
    made = tiny.model(tmp_path, kind)
    built = tiny.reference(made)
    real = sum(parameter.numel() for parameter in built.parameters())
    # Norms and biases are left out; in models of this size they are the most of what is missing.
    small = sum(parameter.numel() for parameter in built.parameters() if parameter.dim() == 1)
    counted = sum(weights.parameters(language_parts(made, "test")[0]).values())
    assert counted == pytest.approx(real - small, rel=0.001)


def test_smollm_has_135_million_parameters() -> None:
    # 49152 x 576 tied, and 30 layers of 576 x 64 x (9 + 3 + 3 + 9) and 3 x 576 x 1536.
    assert sum(weights.parameters(SMOLLM).values()) == 28_311_552 + 30 * (884_736 + 2_654_208) == 134_479_872


def test_kimi_by_hand(tmp_path: Path) -> None:
    target = given(tmp_path, KIMI, engine={"tp": 8})
    experts = 60 * 384 * 3 * 7168 * 2048
    attention = 61 * (7168 * 1536 + 1536 * 64 * 192 + 7168 * 576 + 512 * 64 * 256 + 64 * 128 * 7168)
    rest = 2 * 163840 * 7168 + 3 * 7168 * 18432 + 60 * 3 * 7168 * 2048 + 60 * 384 * 7168
    # Four bits a routed expert's weight and a bfloat16 scale for 32 of them; all else bfloat16.
    by_hand = experts * (0.5 + 2 / 32) + 2 * (attention + rest)
    found, how = weights.weights(target)
    assert found == pytest.approx(by_hand, abs=1)
    assert 590e9 < found < 600e9
    assert how.startswith("counted from config.json")
    # Latent attention keeps 512 + 64 numbers a layer on every GPU.
    assert weights.kv_bytes_per_token(target)[0] == 61 * 576 * 2


def test_key_heads_are_shared_out(tmp_path: Path) -> None:
    one = given(tmp_path / "a", SMOLLM)
    three = given(tmp_path / "b", SMOLLM, engine={"tp": 3})
    eight = given(tmp_path / "c", SMOLLM, engine={"tp": 8})
    assert [weights.kv_bytes_per_token(each)[0] for each in (one, three, eight)] == [30 * 2 * 3 * 64 * 2, 7680, 7680]


def test_files_and_their_index_come_before_counting(tmp_path: Path) -> None:
    made = tiny.model(tmp_path / "files")
    target = given(tmp_path / "files", json.loads((made / "config.json").read_text()), "cpu", target={"layers": [1, 2]})
    real = sum(p.numel() for p in tiny.reference(made).parameters())
    assert weights.weights(target) == (4 * real, "by the heads of its safetensors files")
    place = folder(tmp_path / "index", SMOLLM)
    (place / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1000}, "weight_map": {}})
    )
    assert weights.weights(given(place, SMOLLM))[0] == 1000
    # Bfloat16 on the disk, float32 once loaded.
    assert weights.weights(given(place, SMOLLM, device="cpu"))[0] == 2000


@pytest.mark.parametrize(
    ("settings", "kind", "bits"),
    [
        ({"quant_method": "fp8"}, "dense", 8.0),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}, "attention", None),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}, "experts", 4.25),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "dense", 4.125),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "embedding", None),
    ],
)  # fmt: skip
def test_bits_of_a_quantised_weight(settings: dict[str, object], kind: str, bits: float | None) -> None:
    assert weights._bits([{"quantization_config": settings}], kind) == bits
