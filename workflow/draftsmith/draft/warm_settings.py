"""config.json of a draft that training goes on from: what is read of it is of its kind, and is what the draft here will be."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftsmith.draft.config import DraftShape, layer_of, window_of
from draftsmith.errors import DraftsmithError
from draftsmith.files import read_json
from draftsmith.log import log

_Kind = tuple[str, Callable[[Any], bool]]
_IDS = "eagle_aux_hidden_state_layer_ids"


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


_OBJECT: _Kind = ("an object", lambda value: isinstance(value, dict))
_SWITCH: _Kind = ("true or false", lambda value: isinstance(value, bool))
_SIZE: _Kind = ("a whole number", _whole)
_NUMBER: _Kind = ("a finite number above 0", _positive)
_WORD: _Kind = ("a word", lambda value: isinstance(value, str))
_WORDS: _Kind = (
    "a list of words",
    lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value),
)
_WHOLES: _Kind = ("a list of whole numbers", lambda value: isinstance(value, list) and all(map(_whole, value)))
# What is read of each part; anything else may be as it likes.
_SAID: dict[str, _Kind] = {
    "norm_before_residual": _SWITCH, "fc_norm": _SWITCH, "norm_output": _SWITCH, "norm_before_fc": _SWITCH, _IDS: _WHOLES,
}  # fmt: skip
_TOP: dict[str, _Kind] = _SAID | {"transformer_layer_config": _OBJECT, "eagle_config": _OBJECT, "logit_scale": _NUMBER}
_LAYER: dict[str, _Kind] = {
    "num_attention_heads": _SIZE, "num_key_value_heads": _SIZE, "head_dim": _SIZE, "q_lora_rank": _SIZE, "kv_lora_rank": _SIZE,
    "qk_nope_head_dim": _SIZE, "qk_rope_head_dim": _SIZE, "v_head_dim": _SIZE, "layer_types": _WORDS, "sliding_window": _SIZE,
    "max_position_embeddings": _SIZE, "rms_norm_eps": _NUMBER, "hidden_act": _WORD, "rope_parameters": _OBJECT, "rope_scaling": _OBJECT,
    "rope_theta": _NUMBER,
}  # fmt: skip
_ROPE: dict[str, _Kind] = {"rope_type": _WORD, "type": _WORD, "rope_theta": _NUMBER}


def source_settings(folder: Path) -> dict[str, Any]:
    """Content of the source's config.json, of which every key that is read here is of its kind, or null."""
    try:
        settings = read_json(folder / "config.json")
    except DraftsmithError:
        settings = None
    if not isinstance(settings, dict):
        raise DraftsmithError(f"train.initial_draft: config.json of {folder} is no JSON object; copy or fetch it again")
    _check_kinds(folder, settings, _TOP)
    _check_kinds(folder, settings.get("eagle_config") or {}, _SAID)
    layer = layer_of(settings)
    _check_kinds(folder, layer, _LAYER)
    _check_kinds(folder, layer.get("rope_parameters") or layer.get("rope_scaling") or {}, _ROPE)
    return settings


def _check_kinds(folder: Path, part: Mapping[str, Any], kinds: Mapping[str, _Kind]) -> None:
    for key, (kind, fits) in kinds.items():
        if part.get(key) is not None and not fits(part[key]):
            raise DraftsmithError(
                f"train.initial_draft: {key} in config.json of {folder} is {part[key]!r} and must be {kind}; correct it, or fetch the file again"
            )


def check_settings(folder: Path, settings: Mapping[str, Any], shape: DraftShape) -> None:
    """Fail where ``settings``, checked by :func:`source_settings`, are those of another draft than one of ``shape``; say what it changes.

    Raises :class:`DraftsmithError` naming the first key that does not fit.
    """
    speculators = "speculators_model_type" in settings
    layer = layer_of(settings)
    inner: Mapping[str, Any] = settings.get("eagle_config") or {}
    # The default of an absent one differs between the layouts, as vLLM reads them.
    switches = {"norm_before_residual": speculators, "fc_norm": False, "norm_output": False}
    for name, absent in switches.items():
        has, wanted = bool(settings.get(name, inner.get(name, absent))), getattr(shape, name)
        if has != wanted:
            raise DraftsmithError(
                f"train.initial_draft: {name} of {folder} is {str(has).lower()}; set train.{name}: {str(has).lower()}"
            )
    if settings.get("norm_before_fc", inner.get("norm_before_fc", False)):
        raise DraftsmithError(f"train.initial_draft: norm_before_fc of {folder} is true, which no draft here has")
    sizes: dict[str, int | None] = {"num_attention_heads": shape.heads}
    if shape.latent is None:
        sizes |= {"num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim}
    else:
        sizes |= asdict(shape.latent)
    if bool(layer.get("kv_lora_rank")) != (shape.latent is not None):
        told, kind = ("no latent attention", "llama") if shape.latent else ("latent attention", "mla")
        raise DraftsmithError(f"train.initial_draft: the layer of {folder} has {told}; set train.architecture: {kind}")
    act = layer.get("hidden_act")
    if act not in (None, "silu", "swish"):
        raise DraftsmithError(
            f"train.initial_draft: hidden_act of {folder} is {act}, and every draft here and in vLLM computes silu; name a draft of that"
        )
    for name, size in sizes.items():
        if layer.get(name) is not None and layer[name] != size:
            raise DraftsmithError(
                f"train.initial_draft: {name} of {folder} is {layer[name]} and must be {size}, as a draft of this target has it"
            )
    ids = settings.get(_IDS) or inner.get(_IDS)
    # SGLang counts outputs of layers, of which k is the input of layer k + 1; the key at the top is vLLM's, which counts inputs.
    inputs = bool(settings.get(_IDS))
    readings = [ids] if inputs else [ids, [layer_id + 1 for layer_id in ids or []]]
    if ids and list(shape.layers) not in readings:
        other = f", or {readings[1]} if it was made for SGLang" if len(readings) > 1 else ""
        raise DraftsmithError(
            f"train.initial_draft: {folder} reads the layers {ids}, and the states are those of {list(shape.layers)}; "
            f"set target.layers: {ids}{other}"
        )
    window = window_of(layer)
    if window != shape.attention_window:
        log(
            f"{folder} was trained {_sight(window)}; the draft goes on {_sight(shape.attention_window)}, as train.attention_window says"
        )
    eps = layer.get("rms_norm_eps")
    if eps is not None and float(eps) != shape.rms_norm_eps:
        log(f"{folder} has rms_norm_eps {eps}; the draft goes on with the target's {shape.rms_norm_eps}")
    rope = _rope(layer)
    if rope != shape.rope:
        log(f"{folder} has the rope {rope}; the draft goes on with {shape.rope}, as the target has it")


def _rope(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Rope parameters of a config of transformers 5 or older, as :attr:`DraftShape.rope` has them."""
    rope = dict(layer.get("rope_parameters") or layer.get("rope_scaling") or {})
    kinds = [rope.pop(name, None) for name in ("rope_type", "type")]
    kind = kinds[0] or kinds[1] or "default"
    told = {"rope_type": kind, "rope_theta": float(rope.pop("rope_theta", None) or layer.get("rope_theta") or 10000.0)}
    if kind == "default":
        # Nothing else turns a plain rope.
        return told
    rope = {name: value for name, value in rope.items() if value is not None}
    if kind != "linear" and layer.get("max_position_embeddings"):
        rope.setdefault("original_max_position_embeddings", layer["max_position_embeddings"])
    return told | rope


def _sight(window: int | None) -> str:
    return "on the whole context" if window is None else f"with a window of {window} positions"
