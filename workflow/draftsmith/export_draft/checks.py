"""The export read back and checked as a server needs it, tensor by tensor and key by key."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.draft.config import layer_of
from draftsmith.errors import DraftsmithError
from draftsmith.files import read_json

if TYPE_CHECKING:
    from torch import Tensor

    from draftsmith.draft.config import DraftShape


def expected_tensors(shape: DraftShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight that vLLM's Eagle3LlamaForCausalLM or Eagle3DeepseekV2ForCausalLM loads for a draft of this shape.

    Written out rather than taken from the model, which it is there to check.
    """
    hidden = shape.hidden_size
    tensors: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(shape.layers) * hidden),
        "layers.0.input_layernorm.weight": (hidden,),
        "layers.0.hidden_norm.weight": (hidden,),
        "layers.0.post_attention_layernorm.weight": (hidden,),
        **{f"layers.0.self_attn.{name}.weight": sizes for name, sizes in attention_tensors(shape).items()},
        "layers.0.mlp.gate_proj.weight": (shape.intermediate_size, hidden),
        "layers.0.mlp.up_proj.weight": (shape.intermediate_size, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, shape.intermediate_size),
        "norm.weight": (hidden,),
        "lm_head.weight": (shape.draft_vocab, hidden),
    }
    if shape.fc_norm:
        tensors |= {f"fc_norm.{number}.weight": (hidden,) for number in range(len(shape.layers))}
    if shape.draft_vocab < shape.target_vocab:
        tensors |= {"d2t": (shape.draft_vocab,), "t2d": (shape.target_vocab,)}
    return tensors


def attention_tensors(shape: DraftShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of each weight of the layer's attention."""
    hidden, both = shape.hidden_size, 2 * shape.hidden_size
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    latent = shape.latent
    if latent is None:
        return {"q_proj": (queries, both), "k_proj": (keys, both), "v_proj": (keys, both), "o_proj": (hidden, queries)}
    rank = latent.q_lora_rank
    return {
        "q_a_proj": (rank, both),
        "q_a_layernorm": (rank,),
        "q_b_proj": (queries, rank),
        "kv_a_proj_with_mqa": (latent.kv_lora_rank + latent.qk_rope_head_dim, both),
        "kv_a_layernorm": (latent.kv_lora_rank,),
        "kv_b_proj": (shape.heads * (latent.qk_nope_head_dim + latent.v_head_dim), latent.kv_lora_rank),
        "o_proj": (hidden, shape.heads * latent.v_head_dim),
    }


def check(folder: Path, target: Mapping[str, Any], shape: DraftShape) -> list[dict[str, str]]:
    """Read the export back and check it; returns name, status and detail of each check.

    Raises :class:`DraftsmithError` at the first that fails.
    """
    from safetensors.torch import load_file

    settings = read_json(folder / "config.json")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    checks: list[tuple[str, Callable[[], str]]] = [
        ("tensor names", lambda: _check_names(file, tensors, shape)),
        ("tensor shapes", lambda: _check_shapes(file, tensors, shape)),
        ("tensor dtypes", lambda: _check_dtypes(file, tensors, settings["dtype"])),
        ("finite, not all zero", lambda: _check_values(file, tensors)),
        ("vocabulary mapping", lambda: _check_mapping(file, tensors, shape)),
        ("captured layers", lambda: _check_layers(folder, settings, target)),
        ("sizes of the target", lambda: _check_sizes(folder, settings, target)),
    ]
    return [{"name": name, "status": "ok", "detail": test()} for name, test in checks]


def _check_names(file: Path, tensors: Mapping[str, Tensor], shape: DraftShape) -> str:
    expected = set(expected_tensors(shape))
    missing, surplus = sorted(expected - set(tensors)), sorted(set(tensors) - expected)
    if missing or surplus:
        raise DraftsmithError(
            f"{file}: lacks tensors {missing} and has {surplus} that no server loads; run train_draft again"
        )
    return f"{len(expected)} tensors, lm_head among them, no embedding (the server shares the target's)"


def _check_shapes(file: Path, tensors: Mapping[str, Tensor], shape: DraftShape) -> str:
    for name, expected in expected_tensors(shape).items():
        if tuple(tensors[name].shape) != expected:
            raise DraftsmithError(
                f"{file}: {name} is {list(tensors[name].shape)} and must be {list(expected)}; run train_draft again"
            )
    return f"fc takes {len(shape.layers)} x {shape.hidden_size}, lm_head gives {shape.draft_vocab}"


def _check_dtypes(file: Path, tensors: Mapping[str, Tensor], dtype: str) -> str:
    import torch

    for name, tensor in tensors.items():
        expected = {"d2t": torch.int64, "t2d": torch.bool}.get(name, getattr(torch, dtype))
        if tensor.dtype != expected:
            raise DraftsmithError(f"{file}: {name} is {tensor.dtype} and must be {expected}; run export_draft again")
    return dtype


def _check_values(file: Path, tensors: Mapping[str, Tensor]) -> str:
    import torch

    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            continue
        if not bool(torch.isfinite(tensor).all()):
            raise DraftsmithError(
                f"{file}: {name} has values that are not finite; lower train.learning_rate and train again"
            )
        if not bool(tensor.any()):
            raise DraftsmithError(f"{file}: {name} is all zero; train again")
    return f"{sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point()):,} weights"


def _check_mapping(file: Path, tensors: Mapping[str, Tensor], shape: DraftShape) -> str:
    from draftsmith.draft.teacher import target_ids

    if "d2t" not in tensors:
        return "none: the draft has the target's whole vocabulary"
    ids = target_ids(tensors["d2t"], shape.target_vocab)
    if tensors["t2d"].nonzero().squeeze(1).tolist() != ids.tolist():
        raise DraftsmithError(f"{file}: t2d and d2t name different tokens; run map_vocabulary again")
    return f"{shape.draft_vocab} of {shape.target_vocab} tokens, ids {int(ids[0])} to {int(ids[-1])}"


def _check_layers(folder: Path, settings: Mapping[str, Any], target: Mapping[str, Any]) -> str:
    layers = settings["eagle_aux_hidden_state_layer_ids"]
    if layers != sorted(set(layers)) or not layers or layers[0] < 0 or layers[-1] >= target["num_layers"]:
        raise DraftsmithError(
            f"{folder / 'config.json'}: layers {layers} must be distinct, ascending and below {target['num_layers']}; "
            "correct target.layers"
        )
    if layer_of(settings)["num_aux_hidden_states"] != len(layers):
        raise DraftsmithError(f"{folder / 'config.json'}: num_aux_hidden_states does not count the layers {layers}")
    return f"{layers} of {target['num_layers']}"


def _check_sizes(folder: Path, settings: Mapping[str, Any], target: Mapping[str, Any]) -> str:
    layer = layer_of(settings)
    for key in ("hidden_size", "vocab_size"):
        if layer[key] != target[key]:
            raise DraftsmithError(f"{folder / 'config.json'}: {key} is {layer[key]}, the target's is {target[key]}")
    longest = target.get("max_positions")
    if longest and layer["max_position_embeddings"] < longest:
        raise DraftsmithError(
            f"{folder / 'config.json'}: {layer['max_position_embeddings']} positions are fewer than the target's {longest}"
        )
    return f"width {layer['hidden_size']}, {layer['max_position_embeddings']} positions, rope {json.dumps(layer['rope_parameters'])}"
