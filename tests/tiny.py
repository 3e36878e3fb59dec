"""Tiny random models with a tokenizer, made on the spot: real checkpoints of real architectures, a few hundred kB each."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

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
    """Save a random float32 model of ``model_type`` and a tokenizer into ``folder``.

    Weights are drawn wide enough for the layers to differ clearly, norms away from 1 so that a forgotten norm is seen.
    """
    values: dict[str, object] = {
        "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024, "tie_word_embeddings": False,
        "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **(values | changes))
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, weight.shape[-1] ** -0.5)
            elif "norm" in name:
                weight.uniform_(0.5, 1.5)
    made.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def target(folder: Path, **more: object) -> dict[str, object]:
    """target.json's content for a model made by :func:`model`."""
    config = json.loads((folder / "config.json").read_text())
    count = config["num_hidden_layers"]
    return {
        "source": str(folder), "revision": None, "path": str(folder), "model_type": config["model_type"],
        "architectures": config["architectures"], "num_layers": count, "hidden_size": config["hidden_size"],
        "vocab_size": config["vocab_size"], "max_positions": config["max_position_embeddings"],
        "torch_dtype": "float32", "fingerprint": f"tiny-{folder.name}",
        "trust_remote_code": False, **more,
    }  # fmt: skip
