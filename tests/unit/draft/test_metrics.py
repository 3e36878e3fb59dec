"""Accuracy and simulated acceptance length, by hand."""

from __future__ import annotations

import pytest
import torch

from draftsmith.draft.metrics import Tally

# Five slots with depths 3 3 2 1 3.
DEPTH = torch.tensor([3, 3, 2, 1, 3])
HITS = [
    torch.tensor([True, True, True, False, False]),
    torch.tensor([True, False, True, True]),
    torch.tensor([True, True, False]),
]


def _tally() -> Tally:
    tally = Tally(3)
    tally.add(DEPTH, torch.tensor([5.0, 4.0, 3.0]), HITS)
    return tally


def test_by_hand() -> None:
    """Step 0: 3 of 5. Step 1: 3 of 4; at risk are slots 0 1 2, of which 0 and 2 hit. Step 2: 2 of 3; at risk is slot 0."""
    metrics = _tally().metrics(decay=0.5)
    assert metrics["accuracy"] == pytest.approx([3 / 5, 3 / 4, 2 / 3])
    assert metrics["acceptance"] == pytest.approx([3 / 5, 2 / 3, 1])
    assert metrics["acceptance_length"] == pytest.approx(1 + 3 / 5 + 3 / 5 * 2 / 3 + 3 / 5 * 2 / 3 * 1)
    assert metrics["loss"] == pytest.approx(5 / 5 + 0.5 * 4 / 4 + 0.25 * 3 / 3)


def test_packs_add_up_to_one() -> None:
    parts = Tally(3)
    parts.add(DEPTH[:3], torch.tensor([3.0, 3.0, 2.0]), [HITS[0][:3], HITS[1][:3], HITS[2][:2]])
    parts.add(DEPTH[3:], torch.tensor([2.0, 1.0, 1.0]), [HITS[0][3:], HITS[1][3:], HITS[2][2:]])
    assert torch.equal(parts.sums, _tally().sums)


def test_perfect_draft_on_short_spans_is_not_marked_down() -> None:
    """Spans of three tokens (depths 2 1): all hits give accuracy 1 wherever something counts, and the length 1 + 1 + 1."""
    tally = Tally(3)
    tally.add(torch.tensor([2, 1]), torch.zeros(3), [torch.ones(2, dtype=torch.bool), torch.ones(1, dtype=torch.bool)])
    metrics = tally.metrics(0.8)
    assert metrics["accuracy"][:2] == [1, 1]
    assert metrics["acceptance_length"] == 3


def test_nothing_counted_is_no_division_by_zero() -> None:
    assert Tally(2).metrics(0.8) == {"loss": 0, "accuracy": [0, 0], "acceptance": [0, 0], "acceptance_length": 1}
