"""The same model with fewer layers: the first ones, some of every kind, and nothing else changed."""

from __future__ import annotations

from typing import Any

import pytest

from draftsmith.few_layers import few_layers, shortened

KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "vision_config": {"num_hidden_layers": 61, "kinds": ["v"] * 61},
    "text_config": {
        "num_hidden_layers": 61, "first_k_dense_replace": 1, "moe_layer_freq": 1, "hidden_size": 7168, "n_routed_experts": 384,
        "rope_scaling": {"short_factor": [1.0] * 61},
        "quantization_config": {"quant_method": "compressed-tensors", "ignore": ["lm_head"] * 61},
    },
}  # fmt: skip


def test_kimi_keeps_its_experts_its_quantisation_and_its_tower() -> None:
    """Layer 0 is dense, the others are mixtures of experts; parts that have 61 entries by chance stay as they are."""
    made, count = few_layers(KIMI, 61, 4)
    assert count == 4
    expected = {**KIMI, "text_config": {**KIMI["text_config"], "num_hidden_layers": 4}}  # type: ignore[dict-item]
    assert made == expected
    assert KIMI["text_config"]["num_hidden_layers"] == 61, "the given config is not touched"  # type: ignore[index]


@pytest.mark.parametrize(
    ("more", "count"),
    [
        ({}, 4),
        ({"first_k_dense_replace": 3}, 5),
        ({"first_k_dense_replace": 14}, 16),
        ({"num_dense_layers": 3}, 5),
        ({"moe_layer_start_index": 3}, 5),
        ({"attn_layer_offset": 4, "attn_layer_period": 8}, 8),
        ({"sliding_window_pattern": 6}, 6),
        ({"full_attention_interval": 4, "decoder_sparse_step": 1}, 4),
        ({"full_attention_interval": 30}, 4),
        ({"layer_types": ["sliding"] * 5 + ["full"] + ["sliding"] * 14}, 6),
        ({"layer_types": ["sliding"] * 15 + ["full"] + ["sliding"] * 4}, 4),
        ({"mlp_layer_types": ["dense"] * 4 + ["sparse"] * 16, "layer_types": ["full"] * 20}, 5),
        ({"intermediate_size": list(range(20))}, 4),
        ({"linear_attn_config": {"full_attn_layers": [7, 14], "kda_layers": [1, 2, 3, 4, 5, 6]}}, 8),
        ({"hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-"}, 8),
    ],
)
def test_there_are_some_of_every_kind(more: dict[str, Any], count: int) -> None:
    """Of 20 layers at least four; a kind that first comes far behind is left out, a mixture of experts never is."""
    made, found = few_layers({"num_hidden_layers": 20} | more, 20, 4)
    assert found == count
    assert made["num_hidden_layers"] == count


def test_every_list_of_one_entry_a_layer_is_shortened() -> None:
    config = {
        "n_layer": 20,
        "layer_types": ["full", "linear"] * 10,
        "no_rope_layers": [1, 1, 1, 0] * 5,
        "block_configs": [{"width": place} for place in range(20)],
        "hybrid_override_pattern": "M*" * 10,
        "attention": {"windows": list(range(100, 120))},
        "mlp_only_layers": [0, 2, 9],
        "layer_sizes": [512, 1024],
        "per_layer_config": {"1": {"heads": 2}, "11": {"heads": 4}},
        "num_kv_shared_layers": 15,
        "eos_token_id": list(range(20)),
        "name": "x" * 20,
    }
    assert shortened(config, 20, 4) == {
        "n_layer": 4,
        "layer_types": ["full", "linear", "full", "linear"],
        "no_rope_layers": [1, 1, 1, 0],
        "block_configs": [{"width": 0}, {"width": 1}, {"width": 2}, {"width": 3}],
        "hybrid_override_pattern": "M*M*",
        "attention": {"windows": [100, 101, 102, 103]},
        "mlp_only_layers": [0, 2],
        "layer_sizes": [512, 1024],
        "per_layer_config": {"1": {"heads": 2}},
        "num_kv_shared_layers": 0,
        "eos_token_id": list(range(20)),
        "name": "x" * 20,
    }


def test_a_number_of_layers_that_the_config_leaves_out_is_written_into_it() -> None:
    assert few_layers({"model_type": "llama"}, 32, 4) == ({"model_type": "llama", "num_hidden_layers": 4}, 4)
    made, _ = few_layers({"text_config": {"model_type": "llama"}}, 32, 4)
    assert made == {"text_config": {"model_type": "llama", "num_hidden_layers": 4}}


def test_as_many_layers_as_are_captured_and_no_more_than_there_are() -> None:
    assert few_layers({"num_hidden_layers": 30}, 30, 9)[1] == 9
    assert few_layers({"num_hidden_layers": 2}, 2, 4) == ({"num_hidden_layers": 2}, 2)


@pytest.mark.parametrize(
    "kind", ["gemma3", "gemma3n_text", "gemma4_text", "llama4", "qwen3_next", "gpt_oss", "zamba2", "deepseek_v3"]
)
def test_transformers_accepts_what_is_left_of_its_own_configs(kind: str) -> None:
    """Its classes compare the lengths of their lists with the number of layers."""
    import json

    from transformers import AutoConfig

    config = AutoConfig.for_model(kind)
    whole = json.loads(config.to_json_string(use_diff=False))
    made, count = few_layers(whole, config.get_text_config().num_hidden_layers, 4)
    read = type(config)(**{name: value for name, value in made.items() if name != "model_type"}).get_text_config()
    assert read.num_hidden_layers == count < 13
    assert len(getattr(read, "layer_types", None) or range(count)) == count
