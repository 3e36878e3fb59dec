"""The weights in the precision of the export, with the vocabulary mapping beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from draftsmith.config import Config

if TYPE_CHECKING:
    from torch import Tensor

    from draftsmith.draft.config import DraftShape


def exported_tensors(weights: Mapping[str, Tensor], shape: DraftShape, d2t: Tensor, dtype: Any) -> dict[str, Tensor]:
    """``weights`` in ``dtype``, and the mapping of a draft vocabulary that is not the target's whole one."""
    from draftsmith.draft.teacher import target_ids

    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in weights.items()}
    # With the whole vocabulary vLLM has no mapping to load one into.
    if shape.draft_vocab < shape.target_vocab:
        tensors |= vocabulary_tensors(target_ids(d2t, shape.target_vocab), shape.target_vocab)
    return tensors


def vocabulary_tensors(token_ids: Tensor, target_vocab: int) -> dict[str, Tensor]:
    """``d2t`` int64 [Vd], what to add to a draft id, and ``t2d`` bool [V], for target ids [Vd]."""
    import torch

    in_draft = torch.zeros(target_vocab, dtype=torch.bool)
    in_draft[token_ids] = True
    return {"d2t": token_ids - torch.arange(len(token_ids)), "t2d": in_draft}


def export_dtype(config: Config, target: Mapping[str, Any]) -> Any:
    """torch's dtype for ``export.dtype``."""
    import torch

    asked = config.export.dtype if config.export.dtype != "auto" else str(target.get("torch_dtype") or "bfloat16")
    # Quantised checkpoints may name an integer or an 8-bit float here.
    return getattr(torch, asked) if asked in ("bfloat16", "float16", "float32") else torch.bfloat16
