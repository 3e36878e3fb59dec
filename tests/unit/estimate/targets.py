"""Configs of targets without weights, and the demo's real figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftsmith.config import Config, parse
from draftsmith.estimate.target import Subject, subject

# As moonshotai/Kimi-K2.5 has it, without what plays no part.
KIMI: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
    "text_config": {
        "model_type": "kimi_k2", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
        "num_attention_heads": 64, "num_key_value_heads": 64, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 384, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "moe_layer_freq": 1, "vocab_size": 163840, "max_position_embeddings": 262144, "dtype": "bfloat16", "rope_theta": 50000.0,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32, "type": "int"}}},
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
        },
    },
}  # fmt: skip

SMOLLM: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    "dtype": "bfloat16", "rms_norm_eps": 1e-5,
}  # fmt: skip

DEMO: dict[str, Any] = json.loads((Path(__file__).parent / "demo.json").read_text())


def config(**sections: Any) -> Config:
    """A config of the named sections, the rest default."""
    return parse(sections, "test")


def folder(place: Path, settings: dict[str, Any]) -> Path:
    """A folder with nothing but config.json."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(settings))
    return place


def given(place: Path, settings: dict[str, Any], device: str = "cuda", **sections: Any) -> Subject:
    """The target of a config-only folder in ``place``."""
    return subject(config(**sections), place / "no-results", folder(place, settings), device)[0]
