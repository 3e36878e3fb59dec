"""Rows laid end to end: which go together, in which order, and what a pack holds."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.draft import slots as alignment
from draftsmith.train_draft.dataset import Example

# Packs that are being filled at once; more fill better and mix less.
_OPEN = 32


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
    counts: Tensor
    """int64 [steps], on the CPU: slots that count at each step."""
    row_ids: list[str]
    tokens: int
    """Tokens of the rows, uncut: the unit of pack_tokens and of tokens/s."""

    def to(self, device: torch.device | str) -> Pack:
        """The pack with what the draft computes on moved to ``device``; indices that steer the loop stay."""
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in _MOVED}
        return dataclasses.replace(self, **moved)

    def pin_memory(self) -> Pack:
        """The pack in page-locked memory, from where a GPU copies it without a detour."""
        return dataclasses.replace(self, **{name: getattr(self, name).pin_memory() for name in _MOVED})


_MOVED = ("input_ids", "positions", "aux", "final", "slots")


def collate(examples: Sequence[Example], steps: int) -> Pack:
    """Lay rows end to end, in the order given."""
    ids, positions, aux, final, slots = [], [], [], [], []
    widths, counted = [], []
    base = 0
    for example in examples:
        width = int(example.slots[-1])
        ids.append(example.states.token_ids[1 : width + 1])
        positions.append(torch.arange(1, width + 1))
        aux.append(example.states.aux[:width].flatten(1))
        final.append(example.states.final[example.slots])
        # Slot i of the row is entry i-1 of its part of the pack.
        slots.append(example.slots - 1 + base)
        widths.append(width)
        counted.append(len(example.slots))
        base += width
    depth = torch.cat([example.depth for example in examples])
    return Pack(
        input_ids=torch.cat(ids).long(),
        positions=torch.cat(positions),
        aux=torch.cat(aux),
        final=torch.cat(final),
        slots=torch.cat(slots),
        depth=depth,
        widths=widths,
        counted=counted,
        counts=alignment.counts(depth, steps),
        row_ids=[example.row.row_id for example in examples],
        tokens=sum(example.row.length for example in examples),
    )


def pack_rows(lengths: Sequence[int], order: Sequence[int], capacity: int) -> list[list[int]]:
    """Group rows, taken in ``order``, into packs of at most ``capacity`` tokens; a longer row is alone.

    First fit among the packs that were opened last, so that rows of any lengths fill packs to nearly all of their capacity.
    """
    done: list[list[int]] = []
    filling: list[tuple[int, list[int]]] = []
    for row in order:
        length = lengths[row]
        for place, (used, pack) in enumerate(filling):
            if used + length <= capacity:
                pack.append(row)
                filling[place] = (used + length, pack)
                break
        else:
            filling.append((length, [row]))
            if len(filling) > _OPEN:
                done.append(filling.pop(max(range(len(filling)), key=lambda place: filling[place][0]))[1])
    return done + [pack for _, pack in filling]


def epoch_packs(lengths: Sequence[int], capacity: int, seed: int, epoch: int) -> list[list[int]]:
    """The packs of one pass over the rows: shuffled, packed, and the packs shuffled."""
    shuffle = random.Random(f"{seed}/{epoch}")
    order = list(range(len(lengths)))
    shuffle.shuffle(order)
    packs = pack_rows(lengths, order, capacity)
    # Packs still open at the end are emptier; without this they would always come last.
    shuffle.shuffle(packs)
    return packs


@dataclass(frozen=True)
class Plan:
    """Every pack of the whole training, in order, the same on every process and after every restart.

    A group of ``world x accumulation`` neighbouring packs is one optimiser step. The last group is filled up from the next
    pass over the rows, so that all processes take part in every step and no row is dropped.
    """

    packs: list[list[int]]
    group: int
    per_epoch: float
    """Packs of one pass, on average."""

    @property
    def steps(self) -> int:
        """Optimiser steps."""
        return len(self.packs) // self.group

    def epoch(self, step: int) -> float:
        """Passes over the rows done after ``step`` steps."""
        return step * self.group / self.per_epoch

    def of_rank(self, rank: int, world: int) -> list[list[int]]:
        """Packs of one process, in order."""
        return self.packs[rank::world]


def make_plan(
    lengths: Sequence[int], capacity: int, seed: int, epochs: float, max_steps: int | None, group: int
) -> Plan:
    """Plan ``epochs`` passes over rows of these lengths, or ``max_steps`` steps of ``group`` packs."""
    packs: list[list[int]] = []
    passes = 0
    wanted = None if max_steps is None else max_steps * group
    while True:
        current = epoch_packs(lengths, capacity, seed, passes)
        packs += current
        passes += 1
        if wanted is None and passes >= epochs:
            # The last pass may be a part of one; a step is at least one whole group.
            total = len(packs) - (passes - epochs) * len(current)
            wanted = max(1, -(-round(total) // group)) * group
        if wanted is not None and len(packs) >= wanted:
            return Plan(packs[:wanted], group, len(packs) / passes)
