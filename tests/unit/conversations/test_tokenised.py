"""tokenised: ids and masks that somebody else made."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from draftsmith.conversations import normalise
from draftsmith.conversations.dropped import Unusable
from draftsmith.conversations.sources import RawRow
from draftsmith.conversations.tokenised import Tokenised, parse


def given(**row: Any) -> Tokenised:
    found = normalise(RawRow("f.jsonl", "line 7", row), "f.jsonl", "general")
    assert isinstance(found, Tokenised)
    return found


def test_a_mask_becomes_spans() -> None:
    ids, spans = parse({"input_ids": [9, 8, 7, 6, 5, 4, 3], "loss_mask": [0, 0, 1, 1, 0, 1, 0]})
    assert ids == array("i", [9, 8, 7, 6, 5, 4, 3])
    assert spans == [(2, 4), (5, 6)]
    assert parse({"input_ids": [9, 8], "loss_mask": [False, True]})[1] == [(1, 2)]
    assert parse({"input_ids": [9, 8], "loss_mask": [0.0, 1.0]})[1] == [(1, 2)]
    # Something supervised at the very start is unusual, but not everything.
    assert parse({"input_ids": [9, 8, 7], "loss_mask": [1, 0, 1]})[1] == [(0, 1), (2, 3)]


def test_a_row_keeps_its_names() -> None:
    row = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "id": 5, "domain": "code", "split": "val"}
    assert given(**row) == Tokenised("5", "f.jsonl", "code", array("i", [1, 2, 3]), [(1, 3)], "validation")
    assert given(input_ids=[1, 2], loss_mask=[0, 1]).conversation_id == "f.jsonl:7"
    # Tokens are meant where both are there, whatever else the row still has; ids alone are not enough.
    assert given(input_ids=[1, 2], loss_mask=[0, 1], messages=[{"role": "critic", "content": "x"}]).ids[1] == 2
    with pytest.raises(Unusable, match="no_messages"):
        given(input_ids=[1, 2])


@pytest.mark.parametrize(
    ("ids", "mask", "reason"),
    [
        ("12", [0, 1], "bad_input_ids"),
        ([], [], "bad_input_ids"),
        ([1, "2"], [0, 1], "bad_input_ids"),
        ([1, None], [0, 1], "bad_input_ids"),
        ([1, 2.0], [0, 1], "bad_input_ids"),
        ([True, False], [0, 1], "bad_input_ids"),
        ([[1], [2]], [0, 1], "bad_input_ids"),
        ([[1], 2], [0, 1], "bad_input_ids"),
        ([1, -100], [0, 1], "bad_input_ids"),
        ([1, 2**31], [0, 1], "bad_input_ids"),
        ([1, 2**70], [0, 1], "bad_input_ids"),
        ([1, 2], [0, 2], "bad_loss_mask"),
        ([1, 2], [0, -1], "bad_loss_mask"),
        ([1, 2], [0, 0.5], "bad_loss_mask"),
        ([1, 2], [0, None], "bad_loss_mask"),
        ([1, 2], ["0", "1"], "bad_loss_mask"),
        ([1, 2], 1, "bad_loss_mask"),
        ([1, 2], [0], "mask_length"),
        ([1, 2], [0, 1, 1], "mask_length"),
        ([1, 2], [0, 0], "mask_all_zero"),
        ([1, 2], [1, 1], "mask_all_one"),
        ([1, 2, 3], [1, 1, 0], "mask_all_one"),
    ],
)
def test_bad_shapes_have_codes(ids: Any, mask: Any, reason: str) -> None:
    with pytest.raises(Unusable) as caught:
        given(input_ids=ids, loss_mask=mask)
    assert caught.value.reason == reason


def test_the_lengths_are_told() -> None:
    with pytest.raises(Unusable, match="mask_length: 2 ids and a mask of 3"):
        given(input_ids=[1, 2], loss_mask=[0, 1, 1])


def test_keys() -> None:
    """Rows that differ in what is supervised differ; those that differ in answers alone ask the same."""
    one = given(input_ids=[1, 2, 3, 4], loss_mask=[0, 0, 1, 1])
    assert one.content_key() == given(input_ids=[1, 2, 3, 4], loss_mask=[0, 0, 1, 1], id="other").content_key()
    assert one.content_key() != given(input_ids=[1, 2, 3, 4], loss_mask=[0, 0, 0, 1]).content_key()
    assert one.prompt_key() == given(input_ids=[1, 2, 9], loss_mask=[0, 0, 1]).prompt_key()
    assert one.prompt_key() != given(input_ids=[1, 7, 3, 4], loss_mask=[0, 0, 1, 1]).prompt_key()
    assert len(one.content_key()) == len(one.prompt_key()) == 32
    assert given(input_ids=[1, 2, 3, 4, 5], loss_mask=[0, 1, 0, 1, 0]).prompt_ids() == [1, 2, 3]


def test_ids_are_kept_small() -> None:
    """Python's own lists would take nine times the memory."""
    many = given(input_ids=list(range(1000, 3000)), loss_mask=[0] * 1999 + [1])
    assert many.ids.itemsize * len(many.ids) == 8000
    assert np.asarray(many.ids).dtype == np.int32
