"""The target's head, which turns its stored final states into what the draft learns from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftsmith.errors import DraftsmithError

if TYPE_CHECKING:
    from draftsmith.draft.config import DraftShape

# Most logits held at once when the target's own token is looked for: 2**26 float32 are 256 MiB.
_BLOCK = 1 << 26


class Teacher:
    """The target's output head, whole and reduced to the draft vocabulary.

    Stored final states are post-norm: they go into the head as they are. Products are taken in the head's own dtype and
    give float32.
    """

    def __init__(self, shape: DraftShape, head: Tensor, d2t: Tensor) -> None:
        """``head`` [V, H] in any dtype; ``d2t`` int64 [Vd], offsets: draft id i is target id i + d2t[i]."""
        self.shape = shape
        self.head = head
        self.token_ids = target_ids(d2t, shape.target_vocab)
        self.draft_head = head[self.token_ids].contiguous()
        self.draft_ids = torch.full((shape.target_vocab,), -1, dtype=torch.int64)
        self.draft_ids[self.token_ids] = torch.arange(len(d2t))

    def to(self, device: torch.device | str) -> Teacher:
        """Move to ``device``, in place."""
        for name in ("head", "token_ids", "draft_head", "draft_ids"):
            setattr(self, name, getattr(self, name).to(device))
        return self

    def logits(self, final: Tensor) -> Tensor:
        """The target's logits [n, Vd] over the draft vocabulary, float32, for final states [n, H]."""
        return self._shaped(product(final.to(self.draft_head.dtype), self.draft_head))

    @torch.no_grad()
    def choices(self, final: Tensor) -> Tensor:
        """What the target itself would say: the draft ids [n] (int64) of its likeliest tokens, -1 where outside the draft vocabulary."""
        step = max(1, _BLOCK // len(self.head))
        # Scaling by a positive number and capping keep the order.
        tokens = [product(part.to(self.head.dtype), self.head).argmax(-1) for part in final.split(step)]
        return self.draft_ids[torch.cat(tokens)] if tokens else self.draft_ids[:0]

    def _shaped(self, logits: Tensor) -> Tensor:
        if self.shape.logit_scale != 1.0:
            logits = logits.mul_(self.shape.logit_scale)
        if self.shape.logit_cap is not None:
            logits = logits.div_(self.shape.logit_cap).tanh_().mul_(self.shape.logit_cap)
        return logits


def product(left: Tensor, right: Tensor) -> Tensor:
    """left [n, H] times right [m, H] transposed, both of one dtype: [n, m] of at least float32, sums not rounded to less."""
    if left.dtype in (torch.float32, torch.float64):
        return left @ right.t()
    if left.is_cuda:
        return torch.mm(left, right.t(), out_dtype=torch.float32)
    return left.float() @ right.float().t()


def target_ids(d2t: Tensor, target_vocab: int) -> Tensor:
    """Target ids [Vd] of the draft vocabulary, from offsets ``d2t`` int64 [Vd].

    Raises :class:`DraftsmithError` unless they ascend and lie in the target's vocabulary.
    """
    ids = torch.arange(len(d2t)) + d2t
    if not len(ids) or int(ids[0]) < 0 or int(ids[-1]) >= target_vocab or bool((ids.diff() <= 0).any()):
        raise DraftsmithError(
            "d2t of the vocabulary mapping is damaged: target ids must ascend and lie in "
            f"0 .. {target_vocab - 1}; delete the mapping and run map_vocabulary again"
        )
    return ids
