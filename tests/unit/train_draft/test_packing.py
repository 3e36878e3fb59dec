"""Which rows go together, in which order, on how many processes."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from draftsmith.train_draft.plan import epoch_packs, figures, make_plan, pack_rows, shared_out

LENGTHS = [5, 3, 9, 4, 7, 2, 6, 8, 1, 10, 3, 5]


def test_first_fit_by_hand() -> None:
    """Capacity 10, rows of 6 5 4 3 2 8: 6+4, 5+3+2, 8."""
    assert pack_rows([6, 5, 4, 3, 2, 8], range(6), 10) == [[0, 2], [1, 3, 4], [5]]


def test_longer_row_is_alone() -> None:
    assert pack_rows([3, 20, 3], range(3), 10) == [[0, 2], [1]]


def test_an_epoch_holds_every_row_once_within_capacity() -> None:
    packs = epoch_packs(LENGTHS, 12, seed=0, epoch=0)
    assert sorted(row for pack in packs for row in pack) == list(range(12))
    assert all(sum(LENGTHS[row] for row in pack) <= 12 for pack in packs)
    assert packs != epoch_packs(LENGTHS, 12, seed=0, epoch=1)
    assert packs == epoch_packs(LENGTHS, 12, seed=0, epoch=0)


def test_many_rows_fill_packs() -> None:
    lengths = [60 + (37 * number) % 241 for number in range(2000)]
    packs = epoch_packs(lengths, 2048, seed=3, epoch=0)
    assert sum(lengths) / (2048 * len(packs)) > 0.98


@pytest.mark.parametrize(("epochs", "passes"), [(1, 1), (3, 3), (0.5, 0.5)])
def test_plan_covers_the_epochs(epochs: float, passes: float) -> None:
    plan = make_plan(LENGTHS, 12, seed=0, epochs=epochs, max_steps=None, group=1)
    assert plan.epoch(plan.steps) == pytest.approx(passes, abs=0.1)
    if epochs >= 1:
        seen = Counter(row for pack in plan.packs for row in pack)
        assert set(seen.values()) == {epochs}


def test_ranks_get_as_many_packs_and_no_row_is_lost() -> None:
    """Two processes, three rows of one pack each: two steps, the last filled up from the next pass."""
    plan = make_plan([5, 5, 5], 8, seed=0, epochs=1, max_steps=None, group=2)
    first, second = plan.of_rank(0, 2), plan.of_rank(1, 2)
    assert len(first) == len(second) == plan.steps == 2
    seen = Counter(row for pack in first + second for row in pack)
    assert set(seen) == {0, 1, 2}
    assert sum(seen.values()) == 4


def test_one_row_on_two_processes_still_trains() -> None:
    plan = make_plan([5], 8, seed=0, epochs=1, max_steps=None, group=2)
    assert (plan.of_rank(0, 2), plan.of_rank(1, 2)) == ([[0]], [[0]])


def test_max_steps_wins_over_epochs_exactly() -> None:
    assert make_plan(LENGTHS, 12, seed=0, epochs=1, max_steps=23, group=2).steps == 23


def test_longer_plan_begins_like_the_shorter() -> None:
    short = make_plan(LENGTHS, 12, seed=5, epochs=1, max_steps=None, group=1)
    assert make_plan(LENGTHS, 12, seed=5, epochs=3, max_steps=None, group=1).packs[: len(short.packs)] == short.packs


def test_a_pass_takes_a_row_as_often_as_it_says() -> None:
    repeats = [1, 3, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    packs = epoch_packs(LENGTHS, 12, seed=0, epoch=0, repeats=repeats)
    seen = Counter(row for pack in packs for row in pack)
    assert [seen[row] for row in range(12)] == repeats
    # Once each is the same as not saying it, to the order.
    assert epoch_packs(LENGTHS, 12, 0, 0, [1] * 12) == epoch_packs(LENGTHS, 12, 0, 0)
    plan = make_plan(LENGTHS, 12, seed=0, epochs=2, max_steps=None, group=1, repeats=repeats)
    twice = Counter(row for pack in plan.packs for row in pack)
    assert [twice[row] for row in range(12)] == [2 * times for times in repeats]


def test_how_full_packs_are_by_hand() -> None:
    """6+4, 5+3+2 and 8 of 10: 28 of 30 tokens."""
    lengths = [6, 5, 4, 3, 2, 8]
    packs = pack_rows(lengths, range(6), 10)
    assert figures(lengths, packs, 10) == {"pack_tokens": 10, "packs": 3, "fill": 0.9333}
    assert figures([], [], 10) == {"pack_tokens": 10, "packs": 0, "fill": 0.0}


def test_a_step_is_the_same_packs_on_any_number_of_processes() -> None:
    """Five packs a step on 1, 2, 3 and 8 processes: as many on each, some of them empty, and the same five together."""
    plan = make_plan([5] * 20, 8, seed=0, epochs=1, max_steps=None, group=5)
    assert plan.steps == 4
    for world, each in ((1, 5), (2, 3), (3, 2), (8, 1)):
        assert plan.per_rank(world) == each
        ranks = [plan.of_rank(rank, world) for rank in range(world)]
        assert {len(packs) for packs in ranks} == {4 * each}
        for step in range(4):
            taken = [pack for packs in ranks for pack in packs[step * each : (step + 1) * each] if pack]
            assert sorted(taken) == sorted(plan.packs[step * 5 : step * 5 + 5])


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 8, 9])
def test_every_process_takes_as_many_packs(count: int, world: int) -> None:
    packs = [[number] for number in range(count)]
    shares = [shared_out(packs, rank, world) for rank in range(world)]
    assert {len(share) for share in shares} == {math.ceil(count / world)}
    assert sorted(pack for share in shares for pack in share if pack) == packs


def test_a_step_of_more_packs_than_were_asked_for_is_told() -> None:
    """Six packs a pass: two passes are twelve, which a step of a hundred takes eight times over."""
    lengths = [4] * 6
    said = make_plan(lengths, 4, seed=0, epochs=2, max_steps=None, group=100).overfull(2)
    assert said is not None
    assert "100 packs are one step, and 2 passes over the rows (train.epochs) are 12 packs" in said
    assert "takes 16.7 passes at once; lower train.packs_per_step" in said
    for group in (1, 5, 12):
        assert make_plan(lengths, 4, seed=0, epochs=2, max_steps=None, group=group).overfull(2) is None
