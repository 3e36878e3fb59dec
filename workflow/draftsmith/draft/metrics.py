"""Accuracy per step and the acceptance length that it foretells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from draftsmith.draft.slots import counts, left_at, span_ends


class Counted(Protocol):
    """What the tally reads of a pack: :class:`draftsmith.draft.model.Rows` describes the fields."""

    slots: Tensor
    depth: Tensor
    counted: list[int]


class Tally:
    """Counts of many packs, to be added up over processes and turned into metrics at the end.

    A *hit* is a draft whose likeliest token is the target's likeliest of its whole vocabulary: greedy acceptance. A token
    outside the draft vocabulary can never be hit. A slot is *visited* when a server that answers along the row would draft
    there: the first slot of a span, and from each visited slot the one behind its accepted tokens and the target's own. For
    each step the tally holds, as float64 [5, steps]: cross-entropy summed, slots counted, hits, visited slots at risk (all
    earlier steps were hits), hits among those at risk.
    """

    def __init__(self, steps: int) -> None:
        self.sums = torch.zeros(5, steps, dtype=torch.float64)
        self.tokens = 0

    def add(self, pack: Counted, entropy: Tensor, hits: Sequence[Tensor] | None) -> None:
        """Add a pack with its ``entropy`` [steps] and its ``hits`` bool [N_k] for each step (None: neither accuracy nor acceptance)."""
        steps = self.sums.shape[1]
        self.sums[0] += entropy.double().cpu()
        self.sums[1] += counts(pack.depth, steps).double()
        if hits is None:
            return
        # [N, steps]: a step that does not count is no hit.
        table = torch.zeros(len(pack.depth), steps, dtype=torch.bool)
        for step, hit in enumerate(hits):
            table[left_at(pack.depth, step), step] = hit.cpu()
        accepted = table.long().cumprod(1)
        start = _visited(accepted.sum(1), span_ends(pack.slots.cpu(), pack.counted))
        at_risk = torch.cat([torch.ones_like(accepted[:, :1]), accepted[:, :-1]], 1)[start]
        at_risk = at_risk * (pack.depth[start, None] > torch.arange(steps))
        self.sums[2:] += torch.stack([table.sum(0), at_risk.sum(0), accepted[start].sum(0)]).double()

    def reduce(self, device: torch.device) -> Tally:
        """Add up over all processes, in place."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            moved = torch.cat([self.sums.flatten(), torch.tensor([float(self.tokens)], dtype=torch.float64)]).to(device)
            torch.distributed.all_reduce(moved)
            self.sums, self.tokens = moved[:-1].cpu().view_as(self.sums), int(moved[-1])
        return self

    def counted(self) -> bool:
        """Whether any slot is in the tally."""
        return bool(self.sums[1].any())

    def loss(self, decay: float) -> float:
        """The weighted loss of :mod:`draftsmith.draft.loss` over all packs of the tally."""
        means = self.sums[0] / self.sums[1].clamp(min=1)
        return float((means * decay ** torch.arange(len(means), dtype=torch.float64)).sum())

    def accuracy(self) -> list[float]:
        """Share of hits among the slots of each step, every earlier token being right (teacher-forced)."""
        return _ratios(self.sums[2], self.sums[1])

    def acceptance(self) -> list[float]:
        """Share of hits among the visited slots of each step whose earlier steps were hits too."""
        return _ratios(self.sums[4], self.sums[3])

    def acceptance_length(self) -> float:
        """Tokens that a target's step is expected to yield with as many drafted tokens as there are steps.

            1 + sum over k of  a_0 * a_1 * ... * a_k,   a_k = hits / visited slots at risk at step k

        The 1 is the target's own token; the product is the chance that tokens 0 .. k are all accepted (Leviathan et al.,
        https://arxiv.org/abs/2211.17192, for acceptance rates that depend on the position). Only visited slots count, as a
        server does not draft inside of what it has accepted: a mean over all slots would count easy passages too often.
        Where no span ends within a draft this is accepted tokens / drafts + 1 of that server; drafts that a span's end cuts
        short would bias it low, and conditioning on the slots still at risk is the product-limit estimate of Kaplan and
        Meier (1958). It is greedy decoding along the stored answers: where an answer is not the target's own greedy one,
        the served figure differs.
        """
        rates = torch.tensor(self.acceptance(), dtype=torch.float64)
        return float(1 + rates.cumprod(0).sum())

    def metrics(self, decay: float) -> dict[str, Any]:
        """Loss, accuracy and acceptance per step, and the acceptance length, as plain numbers."""
        return {
            "loss": self.loss(decay),
            "accuracy": self.accuracy(),
            "acceptance": self.acceptance(),
            "acceptance_length": self.acceptance_length(),
        }


def _visited(accepted: Tensor, ends: list[int]) -> Tensor:
    """Entries at which a server drafts, ascending, int64: ``accepted`` [N] tokens of each, spans ending before ``ends``."""
    taken, visited, entry = accepted.tolist(), [], 0
    for end in ends:
        while entry < end:
            visited.append(entry)
            entry += taken[entry] + 1
        entry = end
    return torch.tensor(visited, dtype=torch.int64)


def _ratios(part: Tensor, whole: Tensor) -> list[float]:
    return (part / whole.clamp(min=1)).tolist()
