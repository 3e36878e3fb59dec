"""Which rows go into a pack together, and which pack comes when; without torch, as these are only numbers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

# Packs that are being filled at once; more fill better and mix less.
_OPEN = 32


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


def epoch_packs(
    lengths: Sequence[int], capacity: int, seed: int, epoch: int, repeats: Sequence[int] | None = None
) -> list[list[int]]:
    """The packs of one pass over the rows: shuffled, packed, and the packs shuffled.

    ``repeats`` is how often the pass takes each row; once, without it.
    """
    shuffle = random.Random(f"{seed}/{epoch}")
    taken = repeats or [1] * len(lengths)
    order = [row for row, times in enumerate(taken) for _ in range(times)]
    shuffle.shuffle(order)
    packs = pack_rows(lengths, order, capacity)
    # Packs still open at the end are emptier; without this they would always come last.
    shuffle.shuffle(packs)
    return packs


@dataclass(frozen=True)
class Plan:
    """Every pack of the whole training, in order, the same on every process and after every restart.

    A group of neighbouring packs is one optimiser step, whatever the number of processes. The last group is filled up from
    the next pass over the rows, so that every step is as large and no row is dropped.
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

    def per_rank(self, world: int) -> int:
        """Packs of one optimiser step that a process sums up, if there are ``world`` of them."""
        return -(-self.group // world)

    def of_rank(self, rank: int, world: int) -> list[list[int]]:
        """Packs of one process, in order: as many a step on all, so that some may be empty where the group is no multiple of ``world``."""
        groups = (self.packs[first : first + self.group] for first in range(0, len(self.packs), self.group))
        return [pack for group in groups for pack in shared_out(group, rank, world)]

    def overfull(self, epochs: float) -> str | None:
        """A sentence where one step takes far more than the ``epochs`` that were asked for; None where it does not."""
        asked = self.per_epoch * epochs
        if self.steps > 1 or self.group < asked + 1:
            return None
        return (
            f"train.packs_per_step: {self.group} packs are one step, and {epochs:g} passes over the rows (train.epochs) are "
            f"{asked:.0f} packs: the only step takes {self.epoch(1):.1f} passes at once; lower train.packs_per_step"
        )


def shared_out(packs: Sequence[list[int]], rank: int, world: int) -> list[list[int]]:
    """Those of ``packs`` that one of ``world`` processes takes, filled up with empty ones, so that all take as many.

    A process that takes fewer would leave the others waiting for its share of the weights (FSDP) or of the gradients.
    """
    own = list(packs[rank::world])
    return own + [[]] * (-(-len(packs) // world) - len(own))


def make_plan(
    lengths: Sequence[int],
    capacity: int,
    seed: int,
    epochs: float,
    max_steps: int | None,
    group: int,
    repeats: Sequence[int] | None = None,
) -> Plan:
    """Plan ``epochs`` passes over rows of these lengths, or ``max_steps`` steps of ``group`` packs.

    ``repeats`` is as in :func:`epoch_packs`.
    """
    packs: list[list[int]] = []
    passes = 0
    wanted = None if max_steps is None else max_steps * group
    while True:
        current = epoch_packs(lengths, capacity, seed, passes, repeats)
        packs += current
        passes += 1
        if wanted is None and passes >= epochs:
            # The last pass may be a part of one; a step is at least one whole group.
            total = len(packs) - (passes - epochs) * len(current)
            wanted = max(1, -(-round(total) // group)) * group
        if wanted is not None and len(packs) >= wanted:
            return Plan(packs[:wanted], group, len(packs) / passes)


def figures(lengths: Sequence[int], packs: Sequence[Sequence[int]], capacity: int) -> dict[str, int | float]:
    """How full packs become: their number, and the share of ``capacity`` that rows take.

    The rest is not computed either, as nothing is padded; it only makes steps smaller than they could be.
    """
    tokens = sum(lengths[row] for pack in packs for row in pack)
    return {"pack_tokens": capacity, "packs": len(packs), "fill": round(tokens / (capacity * max(len(packs), 1)), 4)}
