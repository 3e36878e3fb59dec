"""Tiny random models with a tokenizer, made on the spot: real checkpoints of real architectures, a few hundred kB each."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from draftsmith import get_target

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# DeepSeek's attention needs its real latent sizes; yarn as its checkpoints have it.
MLA: dict[str, object] = {
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "q_lora_rank": 256, "head_dim": 64,
    "num_attention_heads": 8, "num_key_value_heads": 8, "moe_intermediate_size": 256, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip

# What a model_type needs besides the sizes that all have; multipliers, windows and scales are chosen so that they show.
_OF_TYPE: dict[str, dict[str, object]] = {
    "deepseek_v3": MLA,
    "gemma": {"num_key_value_heads": 1},
    "gemma3_text": {"query_pre_attn_scalar": 32, "sliding_window": 128},
    "glm4_moe": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "use_qk_norm": True, "routed_scaling_factor": 2.5,
    },
    "gpt_oss": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 128,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "original_max_position_embeddings": 256,
            "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        },
    },
    "granite": {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1, "logits_scaling": 8.0},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"hidden_size": 128, "num_experts": 8, "num_experts_per_tok": 2},
    # LongRoPE with factors that differ clearly; its dictionary wants a number for each pair of a head's 32.
    "phi3": {
        "hidden_size": 128, "original_max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 16, "long_factor": [4.0] * 16, "factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    },
    "qwen3_moe": {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}  # fmt: skip

# Multimodal classes around a text model: the model_type of that, the name that its config is given, and the rest of config.json.
# Their towers have as many layers as the text model, and no weights.
_WRAPPERS: dict[str, tuple[str, str, dict[str, object]]] = {
    "kimi_k25": (
        "deepseek_v3", "kimi_k2",
        {
            "architectures": ["KimiK25ForConditionalGeneration"], "image_token_id": 300, "video_token_id": 301,
            "vision_config": {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 6, "patch_size": 14},
        },
    ),
    "paligemma": (
        "gemma", "gemma",
        {
            "architectures": ["PaliGemmaForConditionalGeneration"], "image_token_index": 300, "projection_dim": 64,
            "vision_config": {
                "model_type": "siglip_vision_model", "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2,
                "num_hidden_layers": 6, "patch_size": 14, "image_size": 28, "projection_dim": 64, "num_image_tokens": 4,
            },
        },
    ),
}  # fmt: skip
_PREFIX = "language_model."
# Kimi's class asks for it before it knows that there will be no pictures.
PREPROCESSOR = {
    "media_proc_cfg": {
        "in_patch_limit": 64, "patch_size": 14, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "merge_kernel_size": 2,
        "fixed_output_tokens": None, "patch_limit_on_one_side": 64, "in_patch_limit_each_frame": 64, "in_patch_limit_video": 64,
        "sample_fps": 2.0, "max_num_frames_each_video": None, "temporal_merge_kernel_size": 4, "timestamp_mode": "hh:mm:ss.fff",
    },
}  # fmt: skip


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of a ChatML model, with end-of-turn as end-of-sequence."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {token: place for place, token in enumerate(special + alphabet)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(special)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token="<|endoftext|>"
    )
    fast.chat_template = CHATML
    return fast


def model(folder: Path, model_type: str = "llama", seed: int = 0, **changes: object) -> Path:
    """Save a random float32 model of ``model_type`` and a tokenizer into ``folder``; ``changes`` go into its config.

    ``kimi_k25`` and ``paligemma`` are multimodal checkpoints without their towers' weights. Weights are drawn wide enough
    for the layers to differ clearly, norms away from 1 and biases away from 0, so that a forgotten one is seen.
    """
    text_type, _, _ = _WRAPPERS.get(model_type, (model_type, "", {}))
    values: dict[str, object] = {
        "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024, "tie_word_embeddings": False,
        "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(seed)
    config = AutoConfig.for_model(text_type, **(values | _OF_TYPE.get(text_type, {}) | changes))
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, weight.shape[-1] ** -0.5)
            elif "norm" in name:
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(0.0, 0.1)
    made.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    if text_type != model_type:
        _wrap(folder, model_type)
    return folder


def _wrap(folder: Path, model_type: str) -> None:
    _, name, rest = _WRAPPERS[model_type]
    path = folder / "model.safetensors"
    save_file({_PREFIX + key: tensor for key, tensor in load_file(path).items()}, path, metadata={"format": "pt"})
    text = json.loads((folder / "config.json").read_text()) | {"model_type": name}
    whole = {
        "model_type": model_type,
        "dtype": text["dtype"],
        "tie_word_embeddings": False,
        "text_config": text,
        **rest,
    }
    (folder / "config.json").write_text(json.dumps(whole))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Hugging Face's text model for a checkpoint made by :func:`model`."""
    config = json.loads((folder / "config.json").read_text())
    if "text_config" not in config:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with tempfile.TemporaryDirectory() as place:
        text = config["text_config"] | {"model_type": _WRAPPERS[config["model_type"]][0]}
        Path(place, "config.json").write_text(json.dumps(text))
        weights = load_file(folder / "model.safetensors")
        weights = {name.removeprefix(_PREFIX): tensor for name, tensor in weights.items()}
        save_file(weights, Path(place, "model.safetensors"), metadata={"format": "pt"})
        return AutoModelForCausalLM.from_pretrained(place, dtype=dtype).eval()


def target(folder: Path, **more: object) -> dict[str, object]:
    """target.json's content for a model made by :func:`model`, its fingerprints the folder's name."""
    described = get_target.describe(folder, source=str(folder), revision=None, trust_remote_code=False)
    name = f"tiny-{folder.name}"
    return described | {"fingerprint": name, "states_fingerprint": name, **more}
