"""The loss: soft cross-entropy to the target's distribution over the draft vocabulary.

For step k of the training-time test, with N_k the number of slots that count at it (of the whole optimiser step: every pack
of the accumulation group on every process),

    loss = sum over k of  decay^k / N_k * sum over slots n of  -sum over v of p_nv log q_nv

where p = softmax of the target's logits over the draft vocabulary (so renormalised there) and q = softmax of the draft's.
Everything behind the matrix products is float32 (float64 for states and weights of float64). :mod:`draftsmith.draft.loss_eager`
is the same in a dozen lines, to be read and compared with. Up to the entropy of p, which has no gradient, it is the KL divergence from
the target to the draft.

What differs from vllm-project/speculators 0.9: only slots whose tokens and target lie in one span of one row count (there the
slot at the end of a turn counts, slots before a span do at later steps, and these can learn from the next row of a pack); the mean is over the whole
optimiser step (there: over each process's pack, then averaged, which weighs slots by their neighbours); decay is 0.8 (there
1.0); final states are stored post-norm, so no norm is applied again (there the draft's kind of RMSNorm is, which is wrong
for targets with another).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftsmith.draft.slots import left_at
from draftsmith.draft.teacher import Teacher, product
from draftsmith.draft.transfer import moved

# Most logits held at once: 2**25 float32 are 128 MiB, of which a handful live at a time. A GPU has the room for larger blocks,
# each of which adds to lm_head's gradient once.
BLOCK = 1 << 25
_BLOCK_GPU = 1 << 27


class Loss(NamedTuple):
    """What a pack contributes. A tuple, in which FSDP finds the tensors that lead back to the weights."""

    loss: Tensor
    """Scalar: the pack's share of the loss above; the shares of a group sum to it."""
    sums: Tensor
    """float32 [steps], no gradient: cross-entropy summed over the pack's slots of each step, unweighted."""
    hits: list[Tensor] | None
    """For each step bool [N_k]: whether the draft's likeliest token is the target's likeliest of its *whole* vocabulary."""


def fast_loss(
    states: Sequence[Tensor],
    depth: Tensor,
    final: Tensor,
    head: Tensor,
    teacher: Teacher,
    counts: Tensor,
    decay: float,
    with_hits: bool = False,
    fuse: bool = False,
) -> Loss:
    """The loss above in blocks of slots: never more than ``BLOCK`` logits, whatever the steps.

    - ``states``: for each step k [N_k, H], as the draft returns them;
    - ``depth``: int64 [N] on the CPU; ``final`` [N, H]: the target's states of the same slots;
    - ``head`` [Vd, H]: the draft's lm_head; ``counts`` [steps]: N_k of the whole optimiser step.

    The target's distribution is computed once a slot and serves every step that learns from it. Gradients are formed in
    the forward pass, while the logits are there, so that none are kept or computed twice; a weight without
    ``requires_grad`` costs nothing. ``hits`` is only computed ``with_hits``, since it needs the target's whole head.
    ``fuse`` lets torch.compile make two kernels of what lies between the matrix products.
    """
    weights = decay ** torch.arange(len(counts), dtype=torch.float64) / counts.cpu().clamp(min=1)
    choices = teacher.choices(final) if with_hits else None
    hits: list[Tensor] = [torch.empty(len(state), dtype=torch.bool, device=final.device) for state in states]
    loss, sums = _BlockLoss.apply(depth, final, teacher, weights.tolist(), choices, hits, fuse, head, *states)
    return Loss(loss, sums, hits if with_hits else None)


class _BlockLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        depth: Tensor,
        final: Tensor,
        teacher: Teacher,
        weights: list[float],
        choices: Tensor | None,
        hits: list[Tensor],
        fuse: bool,
        head: Tensor,
        *states: Tensor,
    ) -> tuple[Tensor, Tensor]:
        learn_head = ctx.needs_input_grad[7]
        learn_states = any(ctx.needs_input_grad[8:])
        device = final.device
        dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else head.dtype
        with torch.autocast(device.type, enabled=False):
            cast_head = head.to(dtype)
            exact = torch.promote_types(dtype, torch.float32)
            d_head = torch.zeros_like(head, dtype=exact) if learn_head else None
            d_states = [torch.zeros_like(state) for state in states] if learn_states else []
            sums = torch.zeros(len(weights), device=device, dtype=exact)
            scales = torch.tensor(weights, dtype=exact).to(device, non_blocking=True)
            # Entry of the final states that each slot of each step learns from, and where a block of them begins and ends.
            sources = [left_at(depth, step) + step for step in range(len(states))]
            size = max(1, (_BLOCK_GPU if final.is_cuda else BLOCK) // len(head))
            edges = torch.arange(0, len(final) + size, size)
            cuts = [torch.searchsorted(source, edges).tolist() for source in sources]
            for block, start in enumerate(edges[:-1].tolist()):
                target = teacher.logits(final[start : start + size]).softmax(-1)
                for step, state in enumerate(states):
                    first, last = cuts[step][block], cuts[step][block + 1]
                    if first == last:
                        continue
                    source = moved(sources[step][first:last], device)
                    own = state[first:last].to(dtype)
                    logits = product(own, cast_head)
                    if choices is not None:
                        hits[step][first:last] = logits.argmax(-1) == choices[source]
                    # At step 0 every slot of the block learns from its own state.
                    learnt_from = None if step == 0 else source - start
                    if not learn_states and d_head is None:
                        sums[step] += _entropy(logits, _rows(target, learnt_from))[0]
                        continue
                    entropy, gradient = (_fused() if fuse else _terms)(logits, target, learnt_from, scales[step], dtype)
                    sums[step] += entropy
                    if learn_states:
                        d_states[step][first:last] = gradient @ cast_head
                    if d_head is not None:
                        _add_product(d_head, gradient, own)
            loss = torch.dot(scales, sums)
        ctx.learn_head, ctx.learn_states = learn_head, learn_states
        ctx.save_for_backward(*([] if d_head is None else [d_head]), *d_states)
        ctx.mark_non_differentiable(sums)
        return loss, sums

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved = list(ctx.saved_tensors)
        d_head = saved.pop(0) * gradient if ctx.learn_head else None
        d_states = [each * gradient for each in saved] if ctx.learn_states else [None] * (len(ctx.needs_input_grad) - 8)
        return (None, None, None, None, None, None, None, d_head, *d_states)


def _rows(target: Tensor, source: Tensor | None) -> Tensor:
    return target if source is None else target[source]


def _entropy(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of ``logits`` [n, Vd] to ``wanted`` [n, Vd], summed, and the log-sum-exp [n, 1]."""
    norm = logits.logsumexp(-1, keepdim=True)
    return norm.sum() - torch.dot(wanted.flatten(), logits.flatten()), norm


def _terms(
    logits: Tensor, target: Tensor, source: Tensor | None, weight: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of ``logits`` [n, Vd] to the rows ``source`` of ``target``, summed, and its gradient times ``weight``.

    ``logits`` are overwritten.
    """
    wanted = _rows(target, source)
    entropy, norm = _entropy(logits, wanted)
    # d loss / d logits = weight * (q - p).
    return entropy, logits.sub_(norm).exp_().sub_(wanted).mul_(weight).to(dtype)


def _terms_to_fuse(
    logits: Tensor, target: Tensor, source: Tensor | None, weight: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The same without writing in place, so that torch.compile can join the passes over ``logits``."""
    wanted = _rows(target, source)
    norm = logits.logsumexp(-1, keepdim=True)
    entropy = (norm.squeeze(-1) - (wanted * logits).sum(-1)).sum()
    return entropy, (((logits - norm).exp() - wanted) * weight).to(dtype)


@cache
def _fused() -> Any:
    # Sizes change with every pack, so none is compiled in.
    return torch.compile(_terms_to_fuse, dynamic=True)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total [Vd, H] float32 += left [n, Vd] transposed times right [n, H]."""
    if left.dtype == total.dtype:
        total.addmm_(left.t(), right)
    elif left.is_cuda:
        total += torch.mm(left.t(), right, out_dtype=torch.float32)
    else:
        total += left.float().t() @ right.float()
