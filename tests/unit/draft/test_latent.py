"""A draft with the latent attention of its target: its sizes, its tensors, and what it is refused for.

That it computes what a server computes is shown by tests/unit/train_draft/test_rollout.py and tests/integration/test_drafted_tokens.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftsmith.config import check_consistent, parse
from draftsmith.draft.config import DraftShape, draft_shape
from draftsmith.draft.latent import Latent
from draftsmith.draft.warm_start import warm_weights
from draftsmith.errors import DraftsmithError
from draftsmith.estimate import training
from draftsmith.export_draft import draft_config, expected_tensors
from draftsmith.files import write_json

# Kimi-K2.5's own, as its config.json has them.
KIMI: dict[str, Any] = {
    "hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
TARGET = {
    "source": "kimi", "path": "kimi", "revision": None, "hidden_size": 7168, "vocab_size": 163840, "layers": [2, 30, 58], "architectures": ["K"],
    "num_layers": 61,
}  # fmt: skip
SMALL = Latent(q_lora_rank=6, kv_lora_rank=10, qk_nope_head_dim=4, qk_rope_head_dim=8, v_head_dim=8)


def of_kimi(changes: dict[str, Any] | None = None, **train: Any) -> DraftShape:
    settings = parse({"train": {"architecture": "mla"} | train}, "test").train
    return draft_shape(TARGET, settings, 32000, text=KIMI | (changes or {}))


def test_sizes_are_the_targets() -> None:
    shape = of_kimi()
    assert shape.latent == Latent(1536, 512, 128, 64, 128)
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (64, 64, 192)
    assert shape.rope == {
        "rope_type": "yarn", "rope_theta": 50000.0, "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    # A Llama layer for the same target has none of it.
    plain = draft_shape(TARGET, parse({}, "test").train, 32000, text=KIMI)
    assert (plain.latent, plain.heads, plain.kv_heads, plain.head_dim) == (None, 56, 8, 128)


@pytest.mark.parametrize(
    ("rope", "sharpening"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, 1.0),
        ({"rope_type": "yarn", "factor": 40.0, "mscale_all_dim": 1.0}, (0.1 * math.log(40) + 1) ** 2),
        ({"rope_type": "yarn", "factor": 40.0, "mscale_all_dim": 0.707}, (0.0707 * math.log(40) + 1) ** 2),
        ({"rope_type": "yarn", "factor": 40.0, "mscale_all_dim": 0.0}, 1.0),
        ({"rope_type": "yarn", "factor": 1.0, "mscale_all_dim": 1.0}, 1.0),
    ],
)
def test_sharpening_is_yarns(rope: dict[str, Any], sharpening: float) -> None:
    assert SMALL.sharpening(rope) == pytest.approx(sharpening)


def test_what_the_target_lacks_is_the_drafts_own() -> None:
    """vLLM loads queries of two steps alone, three times the latent vector as DeepSeek-V3's; and heads must divide the width."""
    latent = of_kimi({"q_lora_rank": None}).latent
    assert latent is not None
    assert latent.q_lora_rank == 3 * 512
    # Of 20 heads beside a width of 7168 = 2^10 x 7 the next smaller number that divides it.
    shape = of_kimi({"num_attention_heads": 20})
    assert (shape.heads, shape.kv_heads) == (16, 16)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        # Keys that vLLM's latent attention reads otherwise than transformers, or not at all.
        {"rope_type": "default", "partial_rotary_factor": 0.5},
        {"rope_type": "default", "rope_dim": 32},
        YARN,
        YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        YARN | {"mscale": 0.707},
        YARN | {"mscale_all_dim": 1.0},
        YARN | {"mscale": 0.707, "mscale_all_dim": 0.5, "beta_fast": 16, "beta_slow": 2},
        YARN | {"attention_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        YARN | {"attention_factor": 1.3},
        YARN | {"truncate": False},
        {"full_attention": YARN | {"mscale_all_dim": 1.0}, "sliding_attention": {"rope_type": "default"}},
    ],
    ids=str,
)
def test_vllm_turns_as_training_did(rope: dict[str, Any]) -> None:
    """Angles, magnitude and sharpening, by the lines of vLLM's DeepseekV2MLAAttention that read the config."""
    pytest.importorskip("vllm")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope
    from vllm.model_executor.models.deepseek_v2 import yarn_get_mscale

    shape = of_kimi({"rope_scaling": None, "rope_parameters": rope, "max_position_embeddings": 16384})
    assert shape.latent is not None
    served, sharpening = dict(shape.rope), 1.0
    if served["rope_type"] != "default":
        served["rope_type"] = "deepseek_llama_scaling" if served.get("attention_factor") == 1.0 else "deepseek_yarn"
        sharpening = yarn_get_mscale(served["factor"], float(served.get("mscale_all_dim", False))) ** 2
    with set_current_vllm_config(VllmConfig()):
        turned = get_rope(64, max_position=16384, rope_parameters=served, is_neox_style=False, dtype=torch.float32)
    cos, sin = LlamaRotaryEmbedding(shape.rotated())(torch.zeros(1), torch.arange(5000)[None])
    mine = torch.cat([cos[0, :, :32], sin[0, :, :32]], -1)
    # vLLM's table is of float32 angles computed on another path, which at position 5000 is a few 1e-4.
    torch.testing.assert_close(turned.cos_sin_cache[:5000].float(), mine, atol=2e-3, rtol=0)
    assert shape.latent.sharpening(shape.rope) == pytest.approx(sharpening)


def test_tensors_are_those_that_vllm_loads(
    make_shape: Callable[..., DraftShape], make_draft: Callable[..., Any]
) -> None:
    shape = make_shape(kv_heads=4, head_dim=12, latent=SMALL)
    draft, _ = make_draft(shape)
    expected = {name: size for name, size in expected_tensors(shape).items() if name not in ("d2t", "t2d")}
    assert {name: tuple(tensor.shape) for name, tensor in draft.state_dict().items()} == expected
    assert {name.split(".")[3] for name in expected if ".q_" in name} == {"q_a_proj", "q_a_layernorm", "q_b_proj"}
    assert training.parameters(shape)["attention"] == sum(
        weight.numel() for name, weight in draft.named_parameters() if "self_attn" in name
    )


def test_the_config_is_one_that_vllm_reads_as_a_draft() -> None:
    """Not as deepseek_v3, of which vLLM makes a layer of multi-token prediction; and with every switch and list in its place."""
    exported = draft_config(parse({"train": {"architecture": "mla"}}, "test"), TARGET, of_kimi(), "bfloat16")
    assert exported["architectures"] == ["Eagle3DeepseekV2ForCausalLM"]
    assert exported["model_type"] == "deepseek_v2"
    assert {name: exported[name] for name in ("q_lora_rank", "kv_lora_rank", "v_head_dim")} == {
        "q_lora_rank": 1536, "kv_lora_rank": 512, "v_head_dim": 128,
    }  # fmt: skip
    assert exported["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 30, 58]
    assert exported["num_aux_hidden_states"] == 3
    assert "speculators_model_type" not in exported


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kv_lora_rank": None}, "no kv_lora_rank; set train.architecture: llama"),
        ({"v_head_dim": 256}, "values no wider than keys"),
        ({"qk_rope_head_dim": 0}, "no qk_rope_head_dim; set train.architecture: llama"),
        ({"qk_rope_head_dim": 63}, "an even number to turn"),
        ({"num_attention_heads": None}, "no num_attention_heads"),
        ({"rope_scaling": {"type": "longrope"}}, "the target has longrope"),
        ({"rope_scaling": {"type": "yarn"}}, "yarn without a factor"),
    ],
)
def test_a_target_that_has_none_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(DraftsmithError, match=said):
        of_kimi(changes)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"train": {"attention_window": 64}}, "always sees the whole context"),
        ({"export": {"layouts": ["hf"]}}, "leave hf out"),
        ({"export": {"layouts": ["sglang"]}}, "set train.norm_before_residual: false"),
    ],
)
def test_what_vllm_cannot_serve_is_refused_before_training(settings: dict[str, Any], said: str) -> None:
    settings["train"] = settings.get("train", {}) | {"architecture": "mla"}
    with pytest.raises(DraftsmithError, match=said):
        check_consistent(parse(settings, "test"), "test")


def test_training_goes_on_from_one_and_not_from_another(
    tmp_path: Path, make_shape: Callable[..., DraftShape], make_draft: Callable[..., Any]
) -> None:
    shape = make_shape(kv_heads=4, head_dim=12, latent=SMALL, draft_vocab=40)
    draft, _ = make_draft(shape)
    exported = draft_config(parse({"train": {"architecture": "mla"}}, "test"), TARGET, shape, "float32")
    save_file(draft.state_dict(), tmp_path / "model.safetensors")
    write_json(tmp_path / "config.json", exported)
    none = torch.empty(0, 16)
    warm = warm_weights(tmp_path, shape, torch.zeros(40, dtype=torch.int64), none, draft.state_dict())
    assert all(torch.equal(warm[name], tensor) for name, tensor in draft.state_dict().items())
    plain, _ = make_draft(make_shape(draft_vocab=40))
    with pytest.raises(DraftsmithError, match=r"has latent attention; set train.architecture: mla"):
        warm_weights(tmp_path, plain.shape, torch.zeros(40, dtype=torch.int64), none, plain.state_dict())
    write_json(tmp_path / "config.json", exported | {"kv_lora_rank": 12})
    with pytest.raises(DraftsmithError, match=r"kv_lora_rank of .* is 12 and must be 10"):
        warm_weights(tmp_path, shape, torch.zeros(40, dtype=torch.int64), none, draft.state_dict())


@pytest.mark.parametrize(
    ("name", "value"), [("factor", "x"), ("mscale", [1]), ("beta_fast", float("nan")), ("rope_theta", "x")]
)
def test_a_rope_of_the_target_without_a_number_is_named(name: str, value: Any) -> None:
    with pytest.raises(
        DraftsmithError, match=rf"config\.json: {name} is .* must be a finite number; correct it, or fetch"
    ):
        of_kimi({"rope_scaling": KIMI["rope_scaling"] | {name: value}})
