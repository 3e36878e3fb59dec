"""What becomes of rows that are too long, too short or of too many turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftsmith.config import Tokenize
from draftsmith.conversations.dropped import Unusable

Span = tuple[int, int]

REASONS = {
    "too_long": "no answer, or with tokenize.truncate 'turn' none as a whole, lies within tokenize.max_length",
    "over_max_length": "the row is longer than tokenize.max_length, and tokenize.truncate is 'drop'",
    "too_few_tokens": "the row has fewer tokens than tokenize.min_tokens",
    "too_short": "fewer tokens than tokenize.min_supervised_tokens are supervised",
    "too_many_turns": "the conversation has more answers than tokenize.max_turns",
}
"""Reason codes of this module with what each means."""


class TokenRow(NamedTuple):
    """A row: token ids, half-open supervised spans, and whether it was longer and has been cut."""

    ids: list[int] | NDArray[np.int32]
    spans: list[Span]
    cut: bool


def check_turns(answers: int, settings: Tokenize) -> None:
    """Raise :class:`Unusable` when a conversation has too many answers."""
    if settings.max_turns is not None and answers > settings.max_turns:
        raise Unusable("too_many_turns", f"{answers} answers")


def fit(ids: list[int], spans: Sequence[Span], settings: Tokenize) -> TokenRow:
    """The row as the settings want it; it ends with its last supervised token.

    Raises :class:`Unusable` with one of :data:`REASONS`.
    """
    longest = settings.max_length
    # What follows the last answer is no part of the row.
    length = spans[-1][1]
    if settings.truncate == "drop" and length > longest:
        raise Unusable("over_max_length", f"{length} tokens")
    if settings.truncate == "turn":
        kept = [(start, end) for start, end in spans if end <= longest]
    else:
        kept = [(start, min(end, longest)) for start, end in spans if start < longest]
    if not kept:
        raise Unusable("too_long", f"{length} tokens")
    end = kept[-1][1]
    if end < settings.min_tokens:
        raise Unusable("too_few_tokens", f"{end} tokens")
    supervised = sum(end - start for start, end in kept)
    if supervised < settings.min_supervised_tokens:
        raise Unusable("too_short", f"{supervised} supervised tokens")
    return TokenRow(ids[:end], kept, length > longest)
