"""lengths: what becomes of rows that are too long, too short or of too many turns."""

from __future__ import annotations

from typing import Any

import pytest

from draftsmith.config import Tokenize
from draftsmith.conversations.dropped import Unusable
from draftsmith.tokenize.lengths import TokenRow, check_turns, fit

# Answers in [4, 8) and [12, 20).
IDS = list(range(100, 120))
SPANS = [(4, 8), (12, 20)]


def fitted(**settings: Any) -> TokenRow | str:
    try:
        return fit(IDS, SPANS, Tokenize(**{"min_supervised_tokens": 1, **settings}))
    except Unusable as unusable:
        return f"{unusable.reason}: {unusable.detail}"


@pytest.mark.parametrize("truncate", ["cut", "turn", "drop"])
def test_a_row_that_fits_is_left_as_it_is(truncate: str) -> None:
    assert fitted(max_length=20, truncate=truncate) == TokenRow(IDS, SPANS, False)


@pytest.mark.parametrize(
    ("truncate", "longest", "expected"),
    [
        ("cut", 19, TokenRow(IDS[:19], [(4, 8), (12, 19)], True)),
        ("cut", 13, TokenRow(IDS[:13], [(4, 8), (12, 13)], True)),
        # Between the answers nothing is supervised, and the row ends with the first.
        ("cut", 12, TokenRow(IDS[:8], [(4, 8)], True)),
        ("turn", 19, TokenRow(IDS[:8], [(4, 8)], True)),
        ("turn", 8, TokenRow(IDS[:8], [(4, 8)], True)),
        ("drop", 19, "over_max_length: 20 tokens"),
    ],
)
def test_policies(truncate: str, longest: int, expected: TokenRow | str) -> None:
    assert fitted(max_length=longest, truncate=truncate) == expected


def test_no_answer_fits() -> None:
    settings = Tokenize(max_length=8, min_supervised_tokens=1)
    with pytest.raises(Unusable, match="too_long: 20 tokens"):
        fit(IDS, [(8, 20)], settings)
    assert fit(IDS, [(7, 20)], settings) == TokenRow(IDS[:8], [(7, 8)], True)
    with pytest.raises(Unusable, match="too_long: 20 tokens"):
        fit(IDS, [(7, 20)], settings.model_copy(update={"truncate": "turn"}))


def test_what_follows_the_last_answer_does_not_count() -> None:
    short = fit(IDS, [(4, 8)], Tokenize(max_length=8, truncate="drop"))
    assert short == TokenRow(IDS[:8], [(4, 8)], False)


def test_short_rows() -> None:
    assert fitted(min_tokens=20) == TokenRow(IDS, SPANS, False)
    assert fitted(min_tokens=21) == "too_few_tokens: 20 tokens"
    # It is the row as it is kept that counts.
    assert fitted(min_tokens=9, max_length=12) == "too_few_tokens: 8 tokens"
    assert fitted(min_supervised_tokens=12) == TokenRow(IDS, SPANS, False)
    assert fitted(min_supervised_tokens=13) == "too_short: 12 supervised tokens"


def test_turns() -> None:
    check_turns(1000, Tokenize())
    check_turns(3, Tokenize(max_turns=3))
    with pytest.raises(Unusable, match="too_many_turns: 4 answers"):
        check_turns(4, Tokenize(max_turns=3))
