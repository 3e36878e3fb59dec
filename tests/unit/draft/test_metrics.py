"""Accuracy and simulated acceptance length, by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from draftsmith.draft.metrics import Tally


def _pack(depth: list[int], slots: list[int], counted: list[int]) -> SimpleNamespace:
    return SimpleNamespace(depth=torch.tensor(depth), slots=torch.tensor(slots), counted=counted)


def _hits(*steps: list[int]) -> list[Tensor]:
    return [torch.tensor(step, dtype=torch.bool) for step in steps]


# A row with spans of five and two slots that count, for three steps.
PACK = _pack([3, 3, 3, 2, 1, 2, 1], [4, 5, 6, 7, 8, 11, 12], [7])
HITS = _hits([1, 1, 0, 1, 1, 0, 1], [0, 1, 1, 1, 1], [0, 1, 1])


def _tally() -> Tally:
    tally = Tally(3)
    tally.add(PACK, torch.tensor([5.0, 4.0, 3.0]), HITS)
    return tally


def test_by_hand() -> None:
    """Accuracy is of all slots: 5 of 7, 4 of 5 and 2 of 3.

    A server drafts at slot 0, has one token accepted and goes on at slot 2; there it has none and goes on at slot 3, whose
    two tokens (the span ends there) are accepted. It drafts at slot 5, the other span's first, in vain, and at slot 6.
    Step 0: slots 0 2 3 5 6, of which 0 3 6 hit. Step 1: slots 0 and 3 are at risk (6 has no second step), 3 hits. Step 2:
    nobody is at risk, as slot 3 is at its span's end.
    """
    metrics = _tally().metrics(decay=0.5)
    assert metrics["accuracy"] == pytest.approx([5 / 7, 4 / 5, 2 / 3])
    assert metrics["acceptance"] == pytest.approx([3 / 5, 1 / 2, 0])
    assert metrics["acceptance_length"] == pytest.approx(1 + 3 / 5 + 3 / 5 * 1 / 2)
    assert metrics["loss"] == pytest.approx(5 / 7 + 0.5 * 4 / 5 + 0.25 * 3 / 3)


def test_packs_add_up_to_one() -> None:
    """The second span as a row of its own, in another pack or behind the first in one: the same counts."""
    parts = Tally(3)
    parts.add(_pack([3, 3, 3, 2, 1], [4, 5, 6, 7, 8], [5]), torch.tensor([4.0, 3.0, 3.0]),
              _hits([1, 1, 0, 1, 1], [0, 1, 1, 1], [0, 1, 1]))  # fmt: skip
    parts.add(_pack([2, 1], [0, 1], [2]), torch.tensor([1.0, 1.0, 0.0]), _hits([0, 1], [1]))
    assert torch.equal(parts.sums, _tally().sums)
    joined = Tally(3)
    joined.add(_pack(PACK.depth.tolist(), [4, 5, 6, 7, 8, 9, 10], [5, 2]), torch.tensor([5.0, 4.0, 3.0]), HITS)
    assert torch.equal(joined.sums, _tally().sums)


def test_easy_passages_are_left_behind_in_few_drafts() -> None:
    """One step, hits 1 1 1 0 0: three of five slots hit, but a server drafts at slots 0 and 2 (hits), then at 4 (none)."""
    tally = Tally(1)
    tally.add(_pack([1] * 5, [3, 4, 5, 6, 7], [5]), torch.zeros(1), _hits([1, 1, 1, 0, 0]))
    assert tally.accuracy() == [3 / 5]
    assert tally.acceptance() == [2 / 3]


def test_perfect_draft_on_short_spans_is_not_marked_down() -> None:
    """A span of three tokens (depths 2 1): all hits give accuracy 1 wherever something counts, and the length 1 + 1 + 1."""
    tally = Tally(3)
    tally.add(_pack([2, 1], [3, 4], [2]), torch.zeros(3), _hits([1, 1], [1]))
    metrics = tally.metrics(0.8)
    assert metrics["accuracy"][:2] == [1, 1]
    assert metrics["acceptance_length"] == 3


def test_nothing_counted_is_no_division_by_zero() -> None:
    assert Tally(2).metrics(0.8) == {"loss": 0, "accuracy": [0, 0], "acceptance": [0, 0], "acceptance_length": 1}
    tally = Tally(2)
    tally.add(_pack([], [], []), torch.zeros(2), _hits([]))
    assert not tally.sums.any()
