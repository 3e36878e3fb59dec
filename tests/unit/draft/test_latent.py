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

from draftsmith.config import check_consistent, parse
from draftsmith.draft.config import DraftShape, Latent, draft_shape
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
    assert shape.rope["rope_type"] == "yarn"
    assert (shape.rope["rope_theta"], shape.rope["factor"], shape.rope["mscale_all_dim"]) == (50000.0, 64.0, 1.0)
    assert "type" not in shape.rope
    # A Llama layer for the same target has none of it.
    plain = draft_shape(TARGET, parse({}, "test").train, 32000, text=KIMI)
    assert (plain.latent, plain.heads, plain.kv_heads, plain.head_dim) == (None, 56, 8, 128)


@pytest.mark.parametrize(
    ("rope", "sharpening"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, 1.0),
        ({"rope_type": "yarn", "factor": 40.0, "mscale_all_dim": 1.0}, (0.1 * math.log(40) + 1) ** 2),
        ({"rope_type": "yarn", "factor": 40.0, "mscale_all_dim": 0.707}, (0.0707 * math.log(40) + 1) ** 2),
        ({"rope_type": "yarn", "factor": 40.0}, 1.0),
        ({"rope_type": "yarn", "factor": 1.0, "mscale_all_dim": 1.0}, 1.0),
    ],
)
def test_sharpening_is_yarns(rope: dict[str, Any], sharpening: float) -> None:
    assert SMALL.sharpening(rope) == pytest.approx(sharpening)


@pytest.mark.parametrize("rank", [6, None])
def test_tensors_are_those_that_vllm_loads(
    rank: int | None, make_shape: Callable[..., DraftShape], make_draft: Callable[..., Any]
) -> None:
    latent = Latent(rank, *list(vars(SMALL).values())[1:])
    shape = make_shape(kv_heads=4, head_dim=12, latent=latent)
    draft, _ = make_draft(shape)
    expected = {name: size for name, size in expected_tensors(shape).items() if name not in ("d2t", "t2d")}
    assert {name: tuple(tensor.shape) for name, tensor in draft.state_dict().items()} == expected
    # One step from the embedding beside the hidden state, 2 x 16 wide, or two.
    query = {"q_proj"} if rank is None else {"q_a_proj", "q_a_layernorm", "q_b_proj"}
    assert query == {name.split(".")[3] for name in expected if ".q_" in name}
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
        ({"rope_scaling": {"type": "longrope"}}, "the target has longrope"),
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
