"""The draft's shape for targets of many families, from their config.json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from draftsmith.config import Train
from draftsmith.draft.config import DraftShape, draft_shape
from draftsmith.draft.initial import initial_draft
from draftsmith.errors import DraftsmithError
from draftsmith.export_draft.checks import expected_tensors
from draftsmith.export_draft.layouts import layout_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "vocab_size": 320,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 1024}


def _shape(folder: Path, config: dict[str, Any], train: Train | None = None, draft_vocab: int = 50) -> DraftShape:
    (folder / "config.json").write_text(json.dumps(config))
    text = config.get("text_config", config)
    target = {"path": str(folder), "layers": [2, 4, 5], "hidden_size": text["hidden_size"], "vocab_size": 320}
    return draft_shape(target, train or Train(), draft_vocab)


def _rope(folder: Path, **changes: Any) -> dict[str, Any]:
    return _shape(folder, LLAMA | changes).rope


def test_sizes_come_from_the_target(tmp_path: Path) -> None:
    shape = _shape(tmp_path, LLAMA | {"head_dim": 32})
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (4, 2, 32)
    assert (shape.intermediate_size, shape.rms_norm_eps, shape.max_positions) == (96, 1e-5, 4096)
    assert (shape.target_vocab, shape.draft_vocab, shape.layers) == (320, 50, (2, 4, 5))
    assert shape.norm_before_residual
    assert not shape.fc_norm


@pytest.mark.parametrize(
    ("width", "heads", "keys", "dim", "expected"),
    [
        # GLM-4.5 and its smaller sibling; 96 divides neither width.
        (5120, 96, 8, 128, (80, 8, 128)),
        (4096, 96, 8, 128, (64, 8, 128)),
        # gpt-oss: 64 divides 2880, so its own.
        (2880, 64, 8, 64, (64, 8, 64)),
        # No multiple of 7 key heads divides 256: heads of 128.
        (256, 28, 7, 64, (2, 2, 128)),
    ],
)
def test_heads_that_divide_the_width(
    width: int, heads: int, keys: int, dim: int, expected: tuple[int, int, int], tmp_path: Path
) -> None:
    """As transformers' LlamaConfig wants them, in training and for readers of EAGLE's layout."""
    sizes = {"hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": keys, "head_dim": dim}
    shape = _shape(tmp_path, LLAMA | {"model_type": "glm4_moe", "num_hidden_layers": 8} | sizes)
    assert (shape.heads, shape.kv_heads, shape.head_dim) == expected
    assert shape.rotated().num_attention_heads == expected[0]


def test_a_draft_with_fewer_heads_than_its_target_is_what_a_server_loads(tmp_path: Path) -> None:
    sizes = {"hidden_size": 80, "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 16}
    shape = _shape(tmp_path, LLAMA | {"model_type": "glm4_moe"} | sizes)
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (10, 2, 16)
    head = torch.randn(320, 80)
    draft = initial_draft(shape, head, head, torch.arange(50), seed=0)
    trained = {name: tuple(tensor.shape) for name, tensor in draft.state_dict().items()}
    assert {"d2t": (50,), "t2d": (320,)} | trained == expected_tensors(shape)
    assert trained["layers.0.self_attn.q_proj.weight"] == (160, 160)
    for layout in ("hf", "sglang"):
        read = AutoConfig.for_model(**layout_config(layout, shape, "bfloat16"))
        assert (read.num_attention_heads, read.num_key_value_heads, read.head_dim) == (10, 2, 16)


def test_settings_win(tmp_path: Path) -> None:
    shape = _shape(tmp_path, LLAMA, Train(intermediate_size=200, norm_before_residual=False, fc_norm=True))
    assert (shape.intermediate_size, shape.norm_before_residual, shape.fc_norm) == (200, False, True)


def test_llama3_scaling_is_inherited_from_the_old_keys(tmp_path: Path) -> None:
    scaling = {
        "type": "llama3",
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    }
    rope = _rope(tmp_path, rope_theta=5e5, rope_scaling=scaling)
    assert rope == {name: value for name, value in scaling.items() if name != "type"} | {"rope_theta": 5e5}


def test_yarn_is_inherited_and_plain_positions_for_mrope(tmp_path: Path) -> None:
    assert _rope(tmp_path, rope_parameters=YARN) == YARN
    mrope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    assert _rope(tmp_path, rope_parameters=mrope) == {"rope_type": "default", "rope_theta": 1e6}


def test_rope_that_servers_read_differently_becomes_plain(tmp_path: Path) -> None:
    plain = {"rope_type": "default", "rope_theta": 1e6}
    assert _rope(tmp_path, rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}) == plain
    assert _rope(tmp_path, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0}) == plain


def test_latent_attention_gets_llama_heads_and_plain_rope(tmp_path: Path) -> None:
    """Kimi-K2.5's sizes: width 7168, so 56 heads of 128 on 8 key heads; dense width, not an expert's."""
    kimi = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
        "text_config": {
            "model_type": "kimi_k2",
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "max_position_embeddings": 262144,
            "rope_theta": 50000.0,
            "rope_scaling": {"type": "yarn", "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0},
            "rms_norm_eps": 1e-5,
        },
    }
    shape = _shape(tmp_path, kimi)
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.intermediate_size) == (56, 8, 128, 18432)
    assert shape.rope == {"rope_type": "default", "rope_theta": 50000.0}
    del kimi["text_config"]["rope_scaling"]["mscale"], kimi["text_config"]["rope_scaling"]["mscale_all_dim"]
    assert _shape(tmp_path, kimi).rope == shape.rope
    assert (shape.max_positions, shape.rms_norm_eps) == (262144, 1e-5)


def test_text_config_that_relies_on_its_class_defaults(tmp_path: Path) -> None:
    """A Gemma 3 checkpoint names few sizes: 8 heads of 256 on 4 are its class's; rope is that of its full-attention layers."""
    shape = _shape(tmp_path, {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 64}})
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (8, 4, 256)
    assert shape.rope["rope_theta"] == 1e6


def test_logits_of_granite_and_gemma_2(tmp_path: Path) -> None:
    granite = _shape(tmp_path, LLAMA | {"model_type": "granite", "logits_scaling": 8.0})
    assert (granite.logit_scale, granite.logit_cap) == (0.125, None)
    gemma = _shape(tmp_path, LLAMA | {"model_type": "gemma2", "head_dim": 16, "final_logit_softcapping": 30.0})
    assert (gemma.logit_scale, gemma.logit_cap) == (1.0, 30.0)


def test_draft_vocabulary_larger_than_the_targets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DraftsmithError, match=r"vocabulary\.size"):
        _shape(tmp_path, LLAMA, draft_vocab=321)


@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_theta", "logits_scaling", "logit_scale", "lm_head_multiplier"])
def test_a_number_that_is_none_is_named(name: str, tmp_path: Path) -> None:
    """Of a type that transformers does not know, so that the config is read as it stands."""
    with pytest.raises(DraftsmithError, match=rf"config\.json: {name} is 'x' and must be a finite number; correct it"):
        _shape(tmp_path, LLAMA | {"model_type": "of_a_test", name: "x"})
