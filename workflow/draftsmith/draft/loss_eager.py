"""The loss of :mod:`draftsmith.draft.loss` as its formula reads: holds all logits, differentiated by torch.

Nothing trains with it. It is what the fast loss is compared with, in values and in gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from draftsmith.draft.loss import Loss
from draftsmith.draft.slots import left_at
from draftsmith.draft.teacher import Teacher


def eager_loss(
    states: Sequence[Tensor], depth: Tensor, final: Tensor, head: Tensor, teacher: Teacher, counts: Tensor, decay: float
) -> Loss:
    """Arguments and result as :func:`draftsmith.draft.loss.fast_loss` has them; ``hits`` are always there."""
    logits = teacher.logits(final)
    choices = teacher.choices(final)
    loss, sums, hits = torch.zeros((), device=final.device), [], []
    for step, state in enumerate(states):
        learnt_from = left_at(depth, step).to(final.device) + step
        own = functional.linear(state, head)
        own = own.to(torch.promote_types(own.dtype, torch.float32))
        entropy = functional.cross_entropy(own, logits[learnt_from].softmax(-1), reduction="sum")
        loss = loss + decay**step / max(1, int(counts[step])) * entropy
        sums.append(entropy.detach())
        hits.append(own.argmax(-1) == choices[learnt_from])
    sums += [torch.zeros_like(loss)] * (len(counts) - len(states))
    return Loss(loss, torch.stack(sums), hits)
