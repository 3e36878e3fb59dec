"""Rows laid end to end: what a pack holds; :mod:`draftsmith.train_draft.plan` says which go together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.draft import slots as alignment
from draftsmith.train_draft.dataset import Example


@dataclass
class Pack:
    """What the draft needs of some rows; see :class:`draftsmith.draft.model.Rows` for the fields it shares.

    Each row is cut to its slots 1 .. M, M the last that counts, and keeps final states of counted slots alone: nothing else
    can reach the loss. There is no padding.
    """

    input_ids: Tensor
    positions: Tensor
    aux: Tensor
    final: Tensor
    """[N, H]: f_i of the slots that count at step 0."""
    slots: Tensor
    depth: Tensor
    widths: list[int]
    counted: list[int]
    firsts: list[int]
    counts: Tensor
    """int64 [steps], on the CPU: slots that count at each step."""
    row_ids: list[str]
    tokens: int
    """Tokens of the rows, uncut: the unit of pack_tokens and of tokens/s."""

    def to(self, device: torch.device | str) -> Pack:
        """The pack with what the draft computes on moved to ``device``; indices that steer the loop stay."""
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in _MOVED}
        return dataclasses.replace(self, **moved)


_MOVED = ("input_ids", "positions", "aux", "final", "slots")


def collate(examples: Sequence[Example], steps: int, pin: bool = False) -> Pack:
    """Lay rows end to end, in the order given; with ``pin`` in page-locked memory, from where a GPU copies without a detour."""
    ids, positions, aux, final, slots = [], [], [], [], []
    widths, counted, firsts = [], [], []
    base = 0
    for example in examples:
        width = int(example.slots[-1])
        ids.append(example.states.token_ids[1 : width + 1].long())
        positions.append(torch.arange(1, width + 1))
        aux.append(example.states.aux[:width].flatten(1))
        final.append(example.states.final[example.slots])
        # Slot i of the row is entry i-1 of its part of the pack.
        slots.append(example.slots - 1 + base)
        firsts.append(int(example.slots[0]) - 1 + base)
        widths.append(width)
        counted.append(len(example.slots))
        base += width
    depth = torch.cat([example.depth for example in examples])
    return Pack(
        input_ids=_joined(ids, pin),
        positions=_joined(positions, pin),
        aux=_joined(aux, pin),
        final=_joined(final, pin),
        slots=_joined(slots, pin),
        depth=depth,
        widths=widths,
        counted=counted,
        firsts=firsts,
        counts=alignment.counts(depth, steps),
        row_ids=[example.row.row_id for example in examples],
        tokens=sum(example.row.length for example in examples),
    )


def _joined(parts: list[Tensor], pin: bool) -> Tensor:
    """``parts`` end to end. Into page-locked memory at once: states are too large to be copied twice."""
    if not pin:
        return torch.cat(parts)
    whole = torch.empty(sum(map(len, parts)), *parts[0].shape[1:], dtype=parts[0].dtype, pin_memory=True)
    return torch.cat(parts, out=whole)


def empty_pack(hidden_size: int, layers: int, steps: int) -> Pack:
    """A pack of no rows: it adds nothing to the loss, and gives every weight a gradient of zeros."""
    nothing = torch.empty(0, dtype=torch.int64)
    return Pack(
        input_ids=nothing,
        positions=nothing,
        aux=torch.empty(0, layers * hidden_size),
        final=torch.empty(0, hidden_size),
        slots=nothing,
        depth=nothing,
        widths=[],
        counted=[],
        firsts=[],
        counts=torch.zeros(steps, dtype=torch.int64),
        row_ids=[],
        tokens=0,
    )
