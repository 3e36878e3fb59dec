"""config.json of the exported draft, in the form of vllm-project/speculators; with latent attention in that of EAGLE's repository.

vLLM reads a Llama layer alone from the former. All norm flags are written out, since vLLM's defaults for absent ones differ between its two formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftsmith.config import Config
from draftsmith.draft.config import DraftShape, window_keys
from draftsmith.files import at_home


def verifier(target: Mapping[str, Any]) -> str:
    """What a server finds the target by: its hub id, or the absolute path of its folder."""
    source = str(target["source"])
    local = source.startswith("package:") or at_home(source).exists() or target.get("revision") is None
    return str(Path(target["path"]).resolve()) if local else source


def layer_config(shape: DraftShape) -> dict[str, Any]:
    """The draft's layer as a LlamaConfig's keys, or a DeepseekV2Config's, which every layout has somewhere."""
    return {
        **_kind(shape),
        "vocab_size": shape.target_vocab,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": shape.max_positions,
        "rope_parameters": shape.rope,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        # Without it vLLM takes fc to be three layers wide, whatever the list of layers says.
        "num_aux_hidden_states": len(shape.layers),
        **window_keys(shape.attention_window),
    }


def _kind(shape: DraftShape) -> dict[str, Any]:
    if shape.latent is None:
        return {"model_type": "llama", "head_dim": shape.head_dim}
    # As "deepseek_v3" vLLM would take any draft for a multi-token-prediction layer.
    return {"model_type": "deepseek_v2", **asdict(shape.latent)}


def eagle_keys(shape: DraftShape, ids: list[int], dtype: str) -> dict[str, Any]:
    """Keys of a draft in the layout of EAGLE's repository, whose config.json has the layer's at its top; ``ids`` as its reader counts layers."""
    return layer_config(shape) | {
        "architectures": ["LlamaForCausalLMEagle3" if shape.latent is None else "Eagle3DeepseekV2ForCausalLM"],
        "draft_vocab_size": shape.draft_vocab,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True},
        "norm_before_residual": shape.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": shape.fc_norm,
        "norm_output": shape.norm_output,
        "dtype": dtype,
    }


def draft_config(config: Config, target: Mapping[str, Any], shape: DraftShape, dtype: str) -> dict[str, Any]:
    """The content of config.json."""
    if shape.latent is not None:
        ids = list(shape.layers)
        return eagle_keys(shape, ids, dtype) | {"eagle_aux_hidden_state_layer_ids": ids}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": config.export.speculative_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": verifier(target), "architectures": target["architectures"]},
        },
        "transformer_layer_config": layer_config(shape),
        "draft_vocab_size": shape.draft_vocab,
        "eagle_aux_hidden_state_layer_ids": list(shape.layers),
        "norm_before_residual": shape.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": shape.fc_norm,
        "norm_output": shape.norm_output,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }
