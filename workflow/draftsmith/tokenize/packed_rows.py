"""What a conversation was made into, as bytes: how workers hand it over, and how the cache keeps it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np

from draftsmith.tokenize.lengths import TokenRow
from draftsmith.tokenize.make_rows import Made

FIELDS = (*(field.name for field in fields(Made)), *TokenRow._fields)
"""Names of all that is packed; another set of them is another format."""


class Packed(NamedTuple):
    """``rest`` is JSON text of everything but the token ids, which are ``ids``: all rows' as little-endian int32."""

    rest: str
    ids: bytes


def pack(made: Made) -> Packed:
    """``made`` as bytes."""
    values: dict[str, Any] = {field.name: getattr(made, field.name) for field in fields(made)}
    values["signature"] = made.signature.hex()
    values["rows"] = [row._replace(ids=[len(row.ids)]) for row in made.rows]
    ids = b"".join(np.asarray(row.ids, dtype="<i4").tobytes() for row in made.rows)
    return Packed(json.dumps(values, separators=(",", ":")), ids)


def unpack(packed: Packed) -> Made:
    """What :func:`pack` was given; token ids are a numpy array of int32 that cannot be written to."""
    values = json.loads(packed.rest)
    ids, start = np.frombuffer(packed.ids, dtype="<i4"), 0
    rows = []
    for given in values["rows"]:
        row = TokenRow(*given)
        end = start + row.ids[0]
        # Spans were pairs before JSON made lists of them.
        rows.append(row._replace(ids=ids[start:end], spans=[(first, last) for first, last in row.spans]))
        start = end
    values |= {"rows": rows, "lost": Counter(values["lost"]), "signature": bytes.fromhex(values["signature"])}
    return Made(**values)
