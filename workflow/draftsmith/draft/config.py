"""The shape of a draft, derived from its target's config.json.

The draft is one Llama layer whatever the target is: vLLM serves that layer beside any target that hands out its states. Where
``train.architecture`` asks for it, its attention is latent as the target's own is.
Width, heads, head size, dense MLP width, rope and positions come from the target, so that a server needs no kernel that it
does not use already; where the target's own cannot be had (latent attention, linear attention, per-layer sizes) the draft
takes heads of 128, and where they do not divide the width as many fewer as do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.config import Train
from draftsmith.draft.latent import Latent, latent_rope, latent_sizes, number, turning
from draftsmith.errors import DraftsmithError
from draftsmith.files import read_json
from draftsmith.log import log

if TYPE_CHECKING:
    from transformers import LlamaConfig

# Rope types that training (transformers) and serving (vLLM 0.26 to 0.33) compute alike for a Llama layer.
_SAFE_ROPE = {"default", "linear", "llama3", "yarn"}
# Keys of multi-axis, partial or layered rope: a text-only draft rotates the whole head by one position.
_DROPPED_ROPE_KEYS = {"mrope_section", "mrope_interleaved", "partial_rotary_factor", "rope_dim", "type"}
_LARGEST_HEAD = 256


@dataclass(frozen=True)
class DraftShape:
    """Sizes and flags of a draft, and how its target's head turns a final state into logits."""

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: dict[str, Any]
    """``rope_parameters`` as transformers 5 and vLLM read them."""
    max_positions: int
    target_vocab: int
    """The target's padded vocabulary, as its config has it."""
    draft_vocab: int
    layers: tuple[int, ...]
    """Ids of the target's layers whose input the draft is given, ascending."""
    norm_before_residual: bool
    fc_norm: bool
    norm_output: bool
    logit_scale: float = 1.0
    """What the target multiplies its head's output with."""
    logit_cap: float | None = None
    """The target's logits z are cap * tanh(z / cap)."""
    attention_window: int | None = None
    """Positions that a query of the draft sees, its own among them; all, where it is None."""
    latent: Latent | None = None
    """Latent attention; then each head has a key of its own and ``head_dim`` is the width of queries and keys."""

    def rotated(self) -> LlamaConfig:
        """A layer whose heads are as wide as what is turned of a head here."""
        if self.latent is None:
            return self.llama()
        # Its other sizes need not be those of a Llama layer, which transformers would refuse.
        turned = self.latent.qk_rope_head_dim
        return replace(self, heads=1, kv_heads=1, head_dim=turned, rope=turning(self.rope)).llama()

    def llama(self) -> LlamaConfig:
        """The layer as transformers' LlamaConfig."""
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=self.target_vocab,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=1,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_positions,
            rms_norm_eps=self.rms_norm_eps,
            rope_parameters=dict(self.rope),
            hidden_act="silu",
            attention_bias=False,
            mlp_bias=False,
            tie_word_embeddings=False,
        )


def window_keys(window: int | None) -> dict[str, Any]:
    """Keys of a layer's config that give its attention a window, in every layout; none where it sees everything.

    vLLM asks for both: the kind of each layer of the draft, and the positions that a sliding one sees, its own among them.
    """
    return {} if window is None else {"layer_types": ["sliding_attention"], "sliding_window": window}


def layer_of(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a draft's config.json that describes its layer, which speculators' form keeps apart."""
    layer: Mapping[str, Any] = settings.get("transformer_layer_config") or settings
    return layer


def window_of(layer: Mapping[str, Any]) -> Any:
    """The window that such keys give; None where the layer sees everything."""
    return layer.get("sliding_window") if "sliding_attention" in (layer.get("layer_types") or []) else None


def draft_shape(
    target: Mapping[str, Any], train: Train, draft_vocab: int, text: Mapping[str, Any] | None = None
) -> DraftShape:
    """The shape of the draft for the target of ``target.json``; ``text`` is its language model's config where that is known.

    Raises :class:`DraftsmithError` when the checkpoint's config lacks a size that has no sensible default.
    """
    if text is None:
        text = text_config(Path(target["path"]), bool(target.get("trust_remote_code")))
    hidden, vocab = int(target["hidden_size"]), int(target["vocab_size"])
    if draft_vocab > vocab:
        raise DraftsmithError(
            f"the draft vocabulary has {draft_vocab} tokens and the target only {vocab}; lower vocabulary.size to at most {vocab}"
        )
    latent = None
    if train.architecture == "mla":
        heads, latent = latent_sizes(text, target)
        kv_heads, head_dim = heads, latent.qk_nope_head_dim + latent.qk_rope_head_dim
    else:
        heads, kv_heads, head_dim = _heads(text, hidden)
    return DraftShape(
        hidden_size=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=train.intermediate_size or _intermediate_size(text, hidden),
        rms_norm_eps=number("rms_norm_eps", text.get("rms_norm_eps") or 1e-6),
        rope=_rope(text, plain=_latent(text)) if latent is None else latent_rope(_of_full_attention(text), text),
        max_positions=int(text.get("max_position_embeddings") or 8192),
        target_vocab=vocab,
        draft_vocab=draft_vocab,
        layers=tuple(target["layers"]),
        norm_before_residual=train.norm_before_residual,
        fc_norm=train.fc_norm,
        norm_output=train.norm_output,
        logit_scale=_logit_scale(text),
        logit_cap=text.get("final_logit_softcapping") or None,
        attention_window=train.attention_window,
        latent=latent,
    )


def text_config(folder: Path, trust_remote_code: bool) -> dict[str, Any]:
    """The config of the checkpoint's language model as a dictionary, defaults filled in where transformers knows the type.

    A multimodal checkpoint keeps it under a key of its own, and may leave out what its class has as a default. A type that
    transformers does not know, or only by remote code that may not run, is read as it stands in the file.
    """
    from transformers import AutoConfig

    raw = read_json(folder / "config.json")
    try:
        known = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        # Remote code and unknown types end in ValueError, ImportError, KeyError or what the remote code raises.
        log(f"{folder.name}: config.json is read as it is, since transformers cannot build it ({type(error).__name__})")
        for key in ("text_config", "llm_config", "language_config"):
            if isinstance(raw.get(key), dict):
                return dict(raw[key])
        return dict(raw)
    return dict(known.get_text_config().to_dict())


def _latent(text: Mapping[str, Any]) -> bool:
    """Whether the target has multi-head latent attention, whose heads and rope say nothing about a Llama layer's."""
    return bool(text.get("kv_lora_rank"))


def _heads(text: Mapping[str, Any], hidden: int) -> tuple[int, int, int]:
    """Query heads, key heads and head size."""
    heads = text.get("num_attention_heads")
    if not _latent(text) and isinstance(heads, int) and heads > 0:
        head_dim = text.get("head_dim") or hidden // heads
        kv_heads = text.get("num_key_value_heads") or heads
        if isinstance(kv_heads, int) and heads % kv_heads == 0 and head_dim % 8 == 0 and head_dim <= _LARGEST_HEAD:
            # transformers' LlamaConfig, which training and readers of EAGLE's layout build, wants heads that divide the width:
            # of GLM-4.5's 96 heads beside a width of 5120 that leaves 80.
            fitting = (count for count in range(heads, 0, -1) if hidden % count == 0 and count % kv_heads == 0)
            count = next(fitting, None)
            if count is not None:
                return count, kv_heads, int(head_dim)
    head_dim = 128 if hidden % 128 == 0 else 64
    if hidden % head_dim:
        raise DraftsmithError(
            f"cannot choose heads for a draft of width {hidden}: the target's own are unusual and the width is no multiple of 64"
        )
    heads = hidden // head_dim
    # A divisor of the heads, at most 8 and not far below: 8 key heads serve tensor parallelism up to 8 without copies.
    kv_heads = next(count for count in range(min(8, heads), 0, -1) if heads % count == 0)
    return heads, kv_heads, head_dim


def _intermediate_size(text: Mapping[str, Any], hidden: int) -> int:
    """Width of the target's dense MLP; of one expert where it has no other; else 8/3 of the hidden size."""
    size = text.get("intermediate_size")
    if isinstance(size, list | tuple):
        size = max(size)
    if not size:
        size = -(-hidden * 8 // (3 * 256)) * 256
    return int(size)


def _of_full_attention(text: Mapping[str, Any]) -> dict[str, Any]:
    """The rope parameters of the target's layers of full attention, as the config has them."""
    rope = text.get("rope_parameters")
    if not isinstance(rope, dict) or not rope:
        # Checkpoints older than transformers 5.
        rope = dict(text.get("rope_scaling") or {})
    if any(isinstance(value, dict) for value in rope.values()):
        # One entry a kind of layer; the draft turns as full attention does, whatever its window.
        rope = rope.get("full_attention") or next(value for value in rope.values() if isinstance(value, dict))
    return dict(rope)


def _rope(text: Mapping[str, Any], plain: bool) -> dict[str, Any]:
    """The target's rope parameters in transformers 5's form; only base frequency where the rest does not carry over."""
    rope = _of_full_attention(text)
    theta = number("rope_theta", rope.get("rope_theta") or text.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "mrope":
        kind = "default"
    # An explicit magnitude is read differently by the vLLM versions that are supported.
    magnitude = kind == "yarn" and any(
        rope.get(key) is not None for key in ("mscale", "mscale_all_dim", "attention_factor")
    )
    if plain or magnitude or kind not in _SAFE_ROPE:
        if kind != "default":
            log(
                f"the draft gets plain rope (base {theta:g}): the target's ({kind}) does not carry over to a Llama layer"
            )
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "default":
        return {"rope_type": "default", "rope_theta": theta}
    kept = {key: value for key, value in rope.items() if key not in _DROPPED_ROPE_KEYS and value is not None}
    if kind != "linear":
        kept.setdefault(
            "original_max_position_embeddings",
            text.get("original_max_position_embeddings") or text.get("max_position_embeddings"),
        )
    return kept | {"rope_type": kind, "rope_theta": theta}


def _logit_scale(text: Mapping[str, Any]) -> float:
    """Factor between the head's output and the logits: Cohere and Falcon-H1 multiply, Granite divides."""
    if text.get("logits_scaling"):
        return 1.0 / number("logits_scaling", text["logits_scaling"])
    name = "logit_scale" if text.get("logit_scale") else "lm_head_multiplier"
    return number(name, text.get(name) or 1.0)
