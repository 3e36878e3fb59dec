"""Shapes of real targets as config files without weights, for engines with ``load_format="dummy"``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16",
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "rope_theta": 500000.0, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip

# The language model of moonshotai/Kimi-K2.5 as its config.json has it: 61 layers, of which the first is dense, and routed experts
# alone in INT4. `rope_type` is the newer name of `type`; without the former some releases of transformers know no yarn.
KIMI_TEXT: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 384,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "routed_scaling_factor": 2.827, "vocab_size": 163840,
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "dtype": "bfloat16",
    "attention_bias": False, "rope_theta": 50000.0, "num_nextn_predict_layers": 0,
    "bos_token_id": 163584, "eos_token_id": 163585, "pad_token_id": 163839,
    "rope_scaling": {
        "rope_type": "yarn", "type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
    "quantization_config": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed", "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"], "input_activations": None, "output_activations": None,
                "weights": {
                    "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False,
                    "actorder": None, "block_structure": None, "observer": "minmax", "observer_kwargs": {},
                },
            },
        },
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    },
}  # fmt: skip

# The whole of it, with a vision tower that a text-only engine leaves out. `image_token_id` is what newer releases read.
KIMI_K2_5: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "dtype": "bfloat16", "tie_word_embeddings": False,
    "bos_token_id": 163584, "eos_token_id": 163585, "pad_token_id": 163839, "ignore_index": -100,
    "media_placeholder_token_id": 163605, "image_token_id": 163605,
    "use_unified_vision_chunk": True, "video_placeholder": "<|kimi_k25_video_placeholder|>",
    "text_config": KIMI_TEXT,
    "vision_config": {
        "vt_hidden_size": 1152, "vt_intermediate_size": 4304, "vt_num_attention_heads": 16, "vt_num_hidden_layers": 27, "patch_size": 14,
        "init_pos_emb_height": 64, "init_pos_emb_width": 64, "init_pos_emb_time": 4, "pos_emb_type": "divided_fixed",
        "merge_kernel_size": [2, 2], "merge_type": "sd2_tpool", "mm_hidden_size": 1152, "mm_projector_type": "patchmerger",
        "projector_hidden_act": "gelu", "projector_ln_eps": 1e-5, "text_hidden_size": 7168, "video_attn_type": "spatial_temporal",
    },
}  # fmt: skip

# Its widths with fewer layers and experts (8 of them are active for a token, as in the original), and nothing quantised.
_LEFT_OUT = ("quantization_config", "dtype", "num_nextn_predict_layers", "pad_token_id")
KIMI_8_LAYERS: dict[str, Any] = {key: value for key, value in KIMI_TEXT.items() if key not in _LEFT_OUT} | {
    "model_type": "deepseek_v3", "num_hidden_layers": 8, "n_routed_experts": 16, "head_dim": 64, "torch_dtype": "bfloat16",
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip

# Small enough to show in a test that the benchmark itself works.
TINY: dict[str, Any] = LLAMA_3_8B | {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
    "vocab_size": 320, "torch_dtype": "float32",
}  # fmt: skip

SHAPES = {"llama-3-8b": LLAMA_3_8B, "kimi-8-layers": KIMI_8_LAYERS, "tiny": TINY}
LAYERS = {"llama-3-8b": [2, 16, 29], "kimi-8-layers": [2, 4, 5], "tiny": [1, 2, 3]}


def write(name: str, folder: Path) -> dict[str, Any]:
    """A folder with nothing but config.json; gives what target.json says of it."""
    values = SHAPES[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return {
        "path": str(folder), "model_type": values["model_type"], "architectures": values["architectures"], "num_layers": values["num_hidden_layers"],
        "hidden_size": values["hidden_size"], "vocab_size": values["vocab_size"], "max_positions": values["max_position_embeddings"],
        "torch_dtype": values["torch_dtype"], "fingerprint": f"shape-{name}", "layers": LAYERS[name],
    }  # fmt: skip
