"""Rows that are tokens already: `input_ids` and `loss_mask`, from a tokeniser that somebody else ran.

They never pass the chat template: what they hold is what is learnt. So what can be checked is: the two lists fit each
other, something is supervised and something is not, and (in :mod:`draftsmith.tokenize.make_rows`) the target knows every id.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftsmith.conversations.dropped import Unusable

REASONS = {
    "bad_input_ids": "`input_ids` is no list of token ids, which are integers from 0 on",
    "bad_loss_mask": "`loss_mask` is no list of 0 and 1",
    "mask_length": "`loss_mask` and `input_ids` have different lengths",
    "mask_all_zero": "`loss_mask` is 0 everywhere, so that nothing is supervised",
    "mask_all_one": "`loss_mask` is 1 up to the end of the last answer, so that the prompt is supervised too",
}
"""Reason codes of :func:`parse` with what each means."""


@dataclass(frozen=True, slots=True)
class Tokenised:
    """A conversation as token ids (array of int32) with half-open supervised spans, ascending and apart from each other.

    ``repeats``, ``source_index`` and ``where`` are as in :class:`draftsmith.conversations.Conversation`.
    """

    conversation_id: str
    source: str
    domain: str
    ids: array[int]
    spans: list[tuple[int, int]]
    split: str | None = None
    repeats: int = 1
    source_index: int = field(default=0, compare=False)
    where: str = field(default="", compare=False)

    def content_key(self) -> str:
        """Identity of the whole row: the first 32 hex digits of SHA-256 over its ids and spans."""
        return _digest(self.ids, array("i", [place for span in self.spans for place in span]))

    def prompt_key(self) -> str:
        """Identity of everything but the answers: of the ids that are not supervised."""
        asked, done = array("i"), 0
        for start, end in self.spans:
            asked += self.ids[done:start]
            done = end
        return _digest(asked + self.ids[done:])

    def prompt_ids(self) -> list[int]:
        """What is asked last: all ids before the last answer."""
        return self.ids[: self.spans[-1][0]].tolist()


def holds_tokens(row: Mapping[str, Any]) -> bool:
    """Whether ``row`` is meant as tokens: it has both `input_ids` and `loss_mask`, whatever else there is."""
    return row.get("input_ids") is not None and row.get("loss_mask") is not None


def parse(row: Mapping[str, Any]) -> tuple[array[int], list[tuple[int, int]]]:
    """The ids of a row and the supervised spans that its mask describes.

    Raises :class:`Unusable` with one of :data:`REASONS`.
    """
    ids = _array(row["input_ids"])
    if ids is None or ids.dtype.kind not in "iu" or not len(ids) or ids.min() < 0 or ids.max() >= 1 << 31:
        raise Unusable("bad_input_ids")
    mask = _array(row["loss_mask"])
    if mask is None or mask.dtype.kind not in "biuf" or not np.isin(mask, (0, 1)).all():
        raise Unusable("bad_loss_mask")
    if len(mask) != len(ids):
        raise Unusable("mask_length", f"{len(ids)} ids and a mask of {len(mask)}")
    if not mask.any():
        raise Unusable("mask_all_zero")
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]]))).tolist()
    spans = list(zip(edges[::2], edges[1::2], strict=True))
    # What follows the last answer is no part of the row.
    if spans[-1][0] == 0:
        raise Unusable("mask_all_one")
    return array("i", ids.astype(np.int32).tobytes()), spans


def _array(given: Any) -> NDArray[Any] | None:
    if not isinstance(given, list):
        return None
    try:
        array = np.asarray(given)
    except (ValueError, OverflowError):
        return None
    return array if array.ndim == 1 else None


def _digest(*parts: array[int]) -> str:
    digest = hashlib.sha256(b"tokens")
    for values in parts:
        digest.update(len(values).to_bytes(8, "little") + np.asarray(values, "<i4").tobytes())
    return digest.hexdigest()[:32]
