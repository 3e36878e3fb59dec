"""Which target state a slot of the draft learns from, and which slots count.

A stored row has tokens x_0 .. x_{L-1}, concatenated aux states g_t and final states f_t (after the target's final norm).
Slot i, for 1 <= i < L, is where a server runs the draft once the target has given x_i: it takes embed(x_i) and
fc(g_{i-1}), and learns softmax(lm_head(f_i)), the target's own prediction of x_{i+1}.

At step k of the training-time test (EAGLE-3, https://arxiv.org/abs/2503.01840, section 3.2) the same slot takes x_{i+k}, the
draft's own state of step k-1 and position i+k, and learns from f_{i+k}. It counts at step k when x_i .. x_{i+k+1} lie in
one span of one row, so that every token it was given and the token it is asked for are the assistant's.

Within a span [s, e) slot i therefore counts at the steps k < e-1-i: its *depth*, capped by the number of steps. Slots that
count at step k+1 are among those of step k, and slot i+k counts at step 0 wherever slot i counts at step k. So one list of
the slots that count at step 0, with their depths, says everything: at step k the entries with depth > k are left, and entry
n then learns from the target state of entry n+k.

Worked example: tokens 10 .. 15, answer (13, 14, 15) = span [3, 6), 15 = end of turn, three steps. Slot 3 takes 13 and
g_2, learns from f_3 (predicts 14), and at step 1 takes 14 and learns from f_4 (predicts 15): depth 2. Slot 4 takes 14 and
learns from f_4: depth 1. Slot 2 does not count, since the target gives the first token of an answer itself; nor does slot 5,
since nobody asks what follows the end of a turn (vllm-project/speculators counts it).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def counted_slots(starts: Sequence[int], ends: Sequence[int], length: int, steps: int) -> tuple[Tensor, Tensor]:
    """The slots of a row that count at step 0, ascending, and their depths.

    ``starts`` and ``ends`` are the row's supervised spans, half open, ascending and disjoint. Returns two int64 tensors
    [N]: slots i (1 <= i < ``length`` - 1) and the number of steps, at most ``steps``, at which each counts.
    """
    slots, depths = [], []
    for start, end in zip(starts, ends, strict=True):
        # There is no slot 0: no state comes before the first token.
        slot = torch.arange(max(int(start), 1), min(int(end), length) - 1)
        slots.append(slot)
        depths.append((min(int(end), length) - 1 - slot).clamp(max=steps))
    if not slots:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    return torch.cat(slots), torch.cat(depths)


def left_at(depth: Tensor, step: int) -> Tensor:
    """Entries of the list of counted slots that count at ``step``: int64, ascending. ``depth`` is int64 [N]."""
    return (depth > step).nonzero().squeeze(1)


def counts(depth: Tensor, steps: int) -> Tensor:
    """How many slots count at each step: int64 [steps]."""
    return (depth[:, None] > torch.arange(steps)).sum(0)


def span_ends(slots: Tensor, counted: Sequence[int]) -> list[int]:
    """Entries of the list of counted slots that lie behind the last one of a span, ascending; the last is N.

    ``slots`` int64 [N] are ascending places in a pack, ``counted`` the entries of each row. The last token of a span has no
    slot that counts, so that neighbouring slots of a row are of one span.
    """
    if not len(slots):
        return []
    breaks = ((slots.diff() != 1).nonzero().squeeze(1) + 1).tolist()
    return sorted({*breaks, *torch.tensor(counted).cumsum(0).tolist()})


def take(x: Tensor, entries: Tensor) -> Tensor:
    """Rows ``entries`` of ``x`` [n, ...]: int64 [m], each at most once, which is what makes the backward pass a plain copy.

    Indexing would have to reckon with repeated entries there, and sorts them.
    """
    return _Take.apply(x, entries)  # type: ignore[no-any-return]


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, entries: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(entries)
        ctx.count = len(x)
        return x.index_select(0, entries)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (entries,) = ctx.saved_tensors
        whole = gradient.new_zeros((ctx.count, *gradient.shape[1:]))
        return whole.index_copy_(0, entries, gradient), None
