"""Packing and unpacking what a conversation was made into."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from typing import Any

import numpy as np

from draftsmith.tokenize.lengths import TokenRow
from draftsmith.tokenize.make_rows import Made
from draftsmith.tokenize.packed_rows import FIELDS, pack, unpack

# Nothing is as it would be without.
FULL = Made(
    rows=[TokenRow([7, 1 << 30, 0, 9], [(1, 2), (3, 4)], True), TokenRow([5], [(0, 1)], False)],
    reason="too_long", detail="ö \ud800", lost=Counter(too_short=2), prompt_tokens=3, by_turn=True, straddled=1,
    special=[0, 9], signature=bytes(range(256)),
)  # fmt: skip


def plain(made: Made) -> dict[str, Any]:
    values = {field.name: getattr(made, field.name) for field in fields(made)}
    return values | {"rows": [row._replace(ids=list(map(int, row.ids))) for row in made.rows]}


def test_everything_comes_back() -> None:
    """Every field is another than an empty one's, so that a new one that is forgotten is missed."""
    empty, back = plain(Made()), plain(unpack(pack(FULL)))
    assert back == plain(FULL)
    assert [name for name, value in empty.items() if back[name] == value] == []
    assert type(back["lost"]) is Counter
    assert all(type(span) is tuple for row in back["rows"] for span in row.spans)
    assert plain(unpack(pack(Made()))) == empty


def test_ids_are_int32_and_nothing_else_is_in_them() -> None:
    packed = pack(FULL)
    assert np.frombuffer(packed.ids, "<i4").tolist() == [7, 1 << 30, 0, 9, 5]
    ids = unpack(packed).rows[0].ids
    assert isinstance(ids, np.ndarray)
    assert ids.dtype == np.int32
    # What was unpacked can be packed again, as it is when a worker's answer goes into the cache.
    assert pack(unpack(packed)) == packed


def test_fields_name_all_that_is_packed() -> None:
    assert set(FIELDS) == {field.name for field in fields(Made)} | {"ids", "spans", "cut"}
