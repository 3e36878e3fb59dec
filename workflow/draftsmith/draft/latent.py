"""Sizes and rope of a draft's multi-head latent attention (MLA), derived from its target's config.

The latent vector and the rotated key of a token are as wide as the target's, so that a server keeps both in one kind of KV
cache. What else there is belongs to the draft alone, and where the target's own cannot be served it gets its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftsmith.errors import DraftsmithError

_INSTEAD = "set train.architecture: llama"
# What yarn says to vLLM's DeepSeek and to transformers alike; mscale has defaults that differ between them, and so is always said.
_YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}


@dataclass(frozen=True)
class Latent:
    """Sizes of multi-head latent attention, by their names in the configs of DeepSeek's family."""

    q_lora_rank: int
    """Width of the queries' latent vector."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def sharpening(self, rope: Mapping[str, Any]) -> float:
        """What scores are multiplied with besides 1 / sqrt(d): the square of yarn's m for ``mscale_all_dim``; 1 without yarn.

        From DeepSeek-V2's own code, which vLLM and transformers follow.
        """
        return 1.0 if rope["rope_type"] == "default" else _m(rope, "mscale_all_dim") ** 2


def _m(rope: Mapping[str, Any], name: str) -> float:
    """yarn's m = 0.1 mscale ln(factor) + 1 (https://arxiv.org/abs/2309.00071, section 3.4, with DeepSeek's mscale)."""
    factor = float(rope["factor"])
    return 0.1 * float(rope[name]) * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def turning(rope: Mapping[str, Any]) -> dict[str, Any]:
    """``rope`` as transformers is to compute angles from it, with vLLM's magnitude of cos and sin written out."""
    if rope["rope_type"] == "default":
        return dict(rope)
    return {**rope, "attention_factor": _m(rope, "mscale") / _m(rope, "mscale_all_dim")}


def latent_sizes(text: Mapping[str, Any], target: Mapping[str, Any]) -> tuple[int, Latent]:
    """Heads, and the sizes of latent attention, for a target whose language model's config is ``text``."""
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_attention_heads")
    sizes = {name: text.get(name) for name in names}
    missing = [name for name, size in sizes.items() if not isinstance(size, int) or size <= 0]
    if missing:
        raise DraftsmithError(
            f"train.architecture: mla needs a target with latent attention, and the config of {target['path']} has no {missing[0]}; {_INSTEAD}"
        )
    # vLLM and SGLang load a draft whose queries are projected in two steps alone; with DeepSeek-V3's ratio where the target has one.
    rank = text.get("q_lora_rank") or 3 * sizes["kv_lora_rank"]  # type: ignore[operator]
    # transformers refuses heads that do not divide the width, and the latent vector does not depend on them.
    hidden = int(target["hidden_size"])
    heads = next(count for count in range(int(sizes.pop("num_attention_heads") or 1), 0, -1) if hidden % count == 0)
    latent = Latent(q_lora_rank=int(rank), **sizes)  # type: ignore[arg-type]
    if latent.v_head_dim > latent.qk_nope_head_dim + latent.qk_rope_head_dim or latent.qk_rope_head_dim % 2:
        raise DraftsmithError(
            f"train.architecture: mla needs values no wider than keys and an even number to turn, and {target['path']} has others; {_INSTEAD}"
        )
    return heads, latent


def latent_rope(rope: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """The target's ``rope`` (of one kind of layer, with ``rope_theta``) as far as vLLM computes it for latent attention."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = number("rope_theta", rope.get("rope_theta") or text.get("rope_theta") or 10000.0)
    if kind == "default":
        return {"rope_type": "default", "rope_theta": theta}
    if kind != "yarn" or not rope.get("factor"):
        has = kind if kind != "yarn" else "yarn without a factor"
        raise DraftsmithError(
            f"train.architecture: mla is served with plain rope or yarn, and the target has {has}; {_INSTEAD}"
        )
    told = {name: value if rope.get(name) is None else number(name, rope[name]) for name, value in _YARN.items()}
    length = rope.get("original_max_position_embeddings") or text.get("max_position_embeddings")
    return {
        "rope_type": "yarn", "rope_theta": theta, "factor": number("factor", rope["factor"]), "original_max_position_embeddings": length, **told,
    }  # fmt: skip


def number(name: str, value: Any) -> float:
    """A finite number of the target's config; raises :class:`DraftsmithError` where ``value``, of the key ``name``, is none."""
    try:
        if math.isfinite(found := float(value)):
            return found
    except (TypeError, ValueError, OverflowError):
        pass
    raise DraftsmithError(
        f"the target's config.json: {name} is {value!r} and must be a finite number; correct it, or fetch the file again"
    )
