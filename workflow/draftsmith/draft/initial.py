"""The draft before its first step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.draft.config import DraftShape
from draftsmith.draft.model import Eagle3Draft
from draftsmith.draft.teacher import target_ids
from draftsmith.draft.warm_start import warm_weights
from draftsmith.errors import DraftsmithError
from draftsmith.target_weights import head_weight

# Standard deviation of new weights, as Llama's initializer_range.
_SPREAD = 0.02


def read_vocabulary(path: Path) -> Tensor:
    """d2t, int64 [Vd], of a vocabulary.safetensors."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return file.get_tensor("d2t")
    except (OSError, SafetensorError) as error:
        raise DraftsmithError(
            f"{path}: holds no readable tensor d2t ({type(error).__name__}); run map_vocabulary again"
        ) from error


def target_head(target: Mapping[str, Any], shape: DraftShape) -> Tensor:
    """The target's output head [V, H] in its checkpoint's dtype, for the target of ``target.json``."""
    head = head_weight(Path(target["path"]))
    expected = (shape.target_vocab, shape.hidden_size)
    if not head.is_floating_point() or tuple(head.shape) != expected:
        raise DraftsmithError(
            f"{target['path']}: lm_head is {head.dtype} {list(head.shape)} and should be floating point {list(expected)}; "
            "a quantised head cannot teach"
        )
    return head


def initial_draft(
    shape: DraftShape, embedding: Tensor, head: Tensor, d2t: Tensor, seed: int, source: Path | None = None
) -> Eagle3Draft:
    """A draft of float32 weights that depend on ``seed`` alone, on the CPU; or those of the draft in the folder ``source``.

    New weights are normal, norms are 1, and lm_head starts from the target's rows of the draft vocabulary (times the factor
    that the target puts behind its head, which a server does not apply to a draft).
    """
    ids = target_ids(d2t, shape.target_vocab)
    draft = Eagle3Draft(shape, embedding)
    if source is not None:
        draft.load_state_dict(warm_weights(source, shape, d2t, embedding, draft.state_dict()))
        return draft
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in draft.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0.0, _SPREAD, generator=generator)
        draft.lm_head.weight.copy_(head[ids].float() * shape.logit_scale)
    return draft
