"""Alignment: which state a slot learns from, and which slots count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from draftsmith.draft.config import DraftShape
from draftsmith.draft.slots import counted_slots, counts, left_at, take
from draftsmith.train_draft.packing import collate


def test_worked_example() -> None:
    """Tokens 10 .. 15, answer 13 14 15: the table of the module's docstring, written out."""
    slots, depth = counted_slots([3], [6], 6, steps=3)
    assert slots.tolist() == [3, 4]
    assert depth.tolist() == [2, 1]
    assert counts(depth, 3).tolist() == [2, 1, 0]
    # Step 0: slots 3 and 4 learn from f_3 and f_4, which predict tokens 14 and 15. Step 1: slot 3 learns from f_4.
    assert (slots[left_at(depth, 0)] + 0).tolist() == [3, 4]
    assert (slots[left_at(depth, 1)] + 1).tolist() == [4]
    assert left_at(depth, 2).tolist() == []


def test_worked_example_inputs_of_a_pack(shape: DraftShape, make_example: Callable[..., Any]) -> None:
    """Slot 3 takes token 13 with g_2, and its target state is f_3; slot 4 takes 14 with g_3 and has f_4."""
    example = make_example(shape, 6, [(3, 6)], 3, seed=0)
    example.states.token_ids = torch.arange(10, 16, dtype=torch.int32)
    pack = collate([example], 3)
    assert pack.input_ids.tolist() == [11, 12, 13, 14]
    assert pack.positions.tolist() == [1, 2, 3, 4]
    assert pack.input_ids[pack.slots].tolist() == [13, 14]
    assert torch.equal(pack.aux[pack.slots], example.states.aux[[2, 3]].flatten(1))
    assert torch.equal(pack.final, example.states.final[[3, 4]])
    assert (pack.counts.tolist(), pack.tokens, pack.widths, pack.counted) == ([2, 1, 0], 6, [4], [2])


def test_spans_do_not_lend_slots_to_each_other() -> None:
    """Adjacent spans [2, 5) and [5, 9): token 4 is followed by token 5, but in another answer."""
    slots, depth = counted_slots([2, 5], [5, 9], 12, steps=7)
    assert slots.tolist() == [2, 3, 5, 6, 7]
    assert depth.tolist() == [2, 1, 3, 2, 1]


def test_depth_is_capped_by_the_steps() -> None:
    _, depth = counted_slots([1], [8], 8, steps=2)
    assert depth.tolist() == [2, 2, 2, 2, 2, 1]


def test_row_that_starts_with_an_answer_has_no_slot_0() -> None:
    slots, depth = counted_slots([0], [4], 4, steps=3)
    assert slots.tolist() == [1, 2]
    assert depth.tolist() == [2, 1]


def test_one_token_spans_and_no_spans_count_nothing() -> None:
    assert counted_slots([2, 4], [3, 5], 6, steps=3)[0].tolist() == []
    assert counted_slots([], [], 6, steps=3)[0].tolist() == []


def test_second_row_of_a_pack_is_shifted(shape: DraftShape, make_example: Callable[..., Any]) -> None:
    """Rows of 6 and 5 tokens with answers [3, 6) and [2, 5): the first keeps 4 slots, so slot 2 of the second is entry 5."""
    pack = collate([make_example(shape, 6, [(3, 6)], 3, 0), make_example(shape, 5, [(2, 5)], 3, 1)], 3)
    assert pack.slots.tolist() == [2, 3, 5, 6]
    assert pack.positions.tolist() == [1, 2, 3, 4, 1, 2, 3]
    assert pack.depth.tolist() == [2, 1, 2, 1]


def test_taken_rows_and_their_gradient() -> None:
    """Each entry once: what is taken gets its own gradient, the rest zeros."""
    x = torch.arange(8.0).view(4, 2).requires_grad_()
    taken = take(x, torch.tensor([1, 3]))
    assert taken.tolist() == [[2.0, 3.0], [6.0, 7.0]]
    (taken * torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[0.0, 0.0], [1.0, 2.0], [0.0, 0.0], [3.0, 4.0]]
    nothing = take(x, torch.empty(0, dtype=torch.int64))
    assert nothing.shape == (0, 2)
