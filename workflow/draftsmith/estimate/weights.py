"""Bytes of the target's weights once loaded: by its files, by their index, or counted from the sizes in its config."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from draftsmith.errors import DraftsmithError
from draftsmith.estimate.target import Subject
from draftsmith.target_weights import loaded_bytes

_ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}
_QUANTISED = ("quantization_config", "compression_config")
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
# A module of each kind, by the names that checkpoints have: lists of what is not quantised are matched with them.
_MODULES = {
    "attention": "model.layers.5.self_attn.o_proj",
    "dense": "model.layers.5.mlp.up_proj",
    "shared": "model.layers.5.mlp.shared_experts.up_proj",
    "experts": "model.layers.5.mlp.experts.3.up_proj",
    "head": "lm_head",
}


def weights(subject: Subject) -> tuple[int, str]:
    """Bytes of all weights and how they were found."""
    if subject.folder is not None:
        if any(subject.folder.glob("*.safetensors")):
            # Of a download that is not complete the index may tell all the same.
            with suppress(DraftsmithError):
                return loaded_bytes(subject.folder, subject.dtype), "by the heads of its safetensors files"
        if (listed := _indexed(subject)) is not None:
            return listed, "total_size of model.safetensors.index.json"
    item = _ITEM[subject.dtype]
    if subject.gguf_parameters is not None:
        return (
            subject.gguf_parameters * item,
            f"{subject.gguf_parameters:,} parameters x {item} bytes, by the GGUF file's head",
        )
    counts = parameters(subject.text)
    size, words = 0.0, []
    for kind, count in counts.items():
        bits = _bits(subject.parts, kind) or 8 * item
        size += count * bits / 8
        if count:
            words.append(f"{count / 1e9:,.2f} G {kind} x {bits / 8:g} B")
    return round(size), "counted from config.json: " + " + ".join(words)


def parameters(text: Mapping[str, Any]) -> dict[str, int]:
    """Parameters of a decoder of the usual kinds by part, from its config; norms and biases are left out."""
    width, depth = text["hidden_size"], text["num_hidden_layers"]
    inner, moe_inner = text.get("intermediate_size") or 4 * width, text.get("moe_intermediate_size")
    experts = next((text[key] for key in _EXPERTS if text.get(key)), 0)
    sparse = sum(_is_sparse(text, layer) for layer in range(depth)) if experts else 0
    expert = 3 * width * (moe_inner or inner)
    shared = text.get("n_shared_experts") or 0
    shared_size = (
        3 * width * text["shared_expert_intermediate_size"]
        if text.get("shared_expert_intermediate_size")
        else shared * expert
    )
    vocabulary = text["vocab_size"] * width
    return {
        "embedding": vocabulary,
        "head": 0 if text.get("tie_word_embeddings") else vocabulary,
        "attention": depth * _attention(text),
        "dense": (depth - sparse) * 3 * width * inner,
        "shared": sparse * shared_size,
        "experts": sparse * experts * expert,
        "router": sparse * experts * width,
    }


def _attention(text: Mapping[str, Any]) -> int:
    width, heads = text["hidden_size"], text.get("num_attention_heads") or 1
    if latent := text.get("kv_lora_rank"):
        # Multi-head latent attention: DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1.
        plain, turned, value = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
        low = text.get("q_lora_rank")
        query = (width * low + low * heads * (plain + turned)) if low else width * heads * (plain + turned)
        return int(query + width * (latent + turned) + latent * heads * (plain + value) + heads * value * width)
    size = text.get("head_dim") or width // heads
    return int(width * size * (2 * heads + 2 * (text.get("num_key_value_heads") or heads)))


def _is_sparse(text: Mapping[str, Any], layer: int) -> bool:
    if layer < (text.get("first_k_dense_replace") or 0) or layer in (text.get("mlp_only_layers") or []):
        return False
    every = text.get("decoder_sparse_step") or text.get("moe_layer_freq") or 1
    return not isinstance(every, int) or (layer + 1) % every == 0


def kv_bytes_per_token(subject: Subject) -> tuple[int, str]:
    """Bytes that a token takes in each GPU's KV cache, and the formula; layers without attention are counted with the rest."""
    text, item, tp = (
        subject.text,
        min(2, _ITEM[subject.dtype]) if subject.device == "cuda" else _ITEM[subject.dtype],
        subject.config.engine.tp,
    )
    depth, heads = text["num_hidden_layers"], text.get("num_attention_heads") or 1
    if latent := text.get("kv_lora_rank"):
        turned = text["qk_rope_head_dim"]
        return depth * (latent + turned) * item, f"{depth} layers x ({latent} + {turned}) x {item} bytes, on every GPU"
    size = text.get("head_dim") or text["hidden_size"] // heads
    own = max(1, (text.get("num_key_value_heads") or heads) // tp)
    return depth * 2 * own * size * item, f"{depth} layers x 2 x {own} key heads x {size} x {item} bytes"


def _indexed(subject: Subject) -> int | None:
    """Total of the checkpoint's index, in the precision asked for."""
    assert subject.folder is not None
    try:
        size = json.loads((subject.folder / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if any(part.get(key) for part in subject.parts for key in _QUANTISED):
        return int(size)
    return round(size * _ITEM[subject.dtype] / _ITEM.get(subject.checkpoint_dtype, 2))


def _bits(parts: list[dict[str, Any]], kind: str) -> float | None:
    """Bits of a quantised weight with its scales; None where this kind of weight is not quantised."""
    settings = next((part[key] for part in parts for key in _QUANTISED if part.get(key)), None)
    if settings is None or kind not in _MODULES:
        return None
    ignored = [*(settings.get("ignore") or []), *(settings.get("modules_to_not_convert") or [])]
    if kind == "head" or any(_matches(pattern, _MODULES[kind]) for pattern in ignored):
        return None
    groups = settings.get("config_groups") or {}
    weights_ = next((group.get("weights") or {} for group in groups.values()), {}) if isinstance(groups, dict) else {}
    bits = weights_.get("num_bits") or settings.get("bits") or _BY_METHOD.get(str(settings.get("quant_method")))
    group = weights_.get("group_size") or settings.get("group_size")
    return None if bits is None else bits + (16 / group if isinstance(group, int) and group > 0 else 0)


# Scales of blocks: of 32 numbers in a byte for mxfp4, of 128 x 128 in four for fp8.
_BY_METHOD = {"fp8": 8.0, "mxfp4": 4.25}


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    # Lists of names go by layer: the last part of a name tells the kind, or that it means all of a kind.
    kind, last = _kind(module), pattern.rstrip(".*").rsplit(".", 1)[-1]
    return _kind(pattern) == kind and last in (module.rsplit(".", 1)[-1], _WORDS.get(kind, "").strip("."))


def _kind(module: str) -> str:
    return next((kind for kind, word in _WORDS.items() if word in f"{module}."), "dense")


_WORDS = {"attention": "self_attn", "shared": "shared_experts", "experts": ".experts."}
