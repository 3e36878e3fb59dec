"""The formula of the acceptance length, by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from draftsmith.evaluate_draft.counts import Counts


def metrics(drafts: int, tokens: int, accepted: int, positions: list[int]) -> list[SimpleNamespace]:
    return [
        SimpleNamespace(name="vllm:spec_decode_num_drafts", value=drafts),
        SimpleNamespace(name="vllm:spec_decode_num_draft_tokens", value=tokens),
        SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens", value=accepted),
        SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=positions),
        SimpleNamespace(name="vllm:other", value=7),
    ]


def test_acceptance_length_is_one_plus_accepted_over_drafts() -> None:
    counts = Counts.read(metrics(10, 30, 8, [5, 2, 1])).since(Counts.read(metrics(6, 18, 2, [2, 0, 0])))
    assert (counts.drafts, counts.draft_tokens, counts.accepted, counts.per_position) == (4, 12, 6, [3, 2, 1])
    assert counts.acceptance_length == pytest.approx(1 + 6 / 4)
    assert counts.figures()["per_position"] == [0.75, 0.5, 0.25]


def test_domains_are_summed_not_averaged() -> None:
    """A domain with more drafts counts for more: (1 + 30) accepted of (10 + 30) drafts."""
    small = {"drafts": 10, "draft_tokens": 30, "accepted": 1, "per_position": [1, 0, 0]}
    large = {"drafts": 30, "draft_tokens": 90, "accepted": 30, "per_position": [20, 8, 2]}
    total = Counts.of([small, large])
    assert total.acceptance_length == pytest.approx(1 + 31 / 40)
    assert total.per_position == [21, 8, 2]


def test_nothing_drafted_is_an_acceptance_length_of_one() -> None:
    assert Counts().acceptance_length == 1.0
    assert Counts.read([]).since(Counts()).figures()["per_position"] == []
