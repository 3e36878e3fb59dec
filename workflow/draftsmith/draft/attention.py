"""Attention of the draft's layer in the training-time test.

At step 0 a slot sees the slots of its row up to itself. At step k it sees the same keys *of step 0*, and its own keys of the
steps 1 .. k: what a server's KV cache holds after k tokens were drafted from that slot. So every later step adds one
diagonal, and slots of a later step never see one another: only the slots that count are queries, while keys of step 0 come
from all slots.

With a window of W (``train.attention_window``) a query sees W positions, its own among them, as vLLM counts a sliding window.
At step k slot i stands at position i + k: it sees the keys of step 0 behind i + k - W, and its own of the steps behind k - W.

Four forms of it give the same: :mod:`draftsmith.draft.attention_rows` (any device), :mod:`draftsmith.draft.attention_flash` (half
precision on a GPU), :mod:`draftsmith.draft.attention_flex` (any precision on a GPU), and :mod:`draftsmith.draft.attention_eager`,
which all are tested against.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

from torch import Tensor

Kind = Literal["auto", "flash", "flex", "rows"]


@dataclass(frozen=True)
class Segment:
    """One row of a pack: its queries are ``first_query`` to ``last_query``, its keys ``first_key`` to ``last_key`` (half open).

    A row may have no queries. Keys of neighbouring rows are neighbours, and so are their queries.
    """

    first_query: int
    last_query: int
    first_key: int
    last_key: int
    first_seen: int
    """Index of a key which, with those before it, every query of the row sees; ``first_key`` at least."""


class Attend(Protocol):
    """Attention over the row's keys of step 0 and the query's own keys of later steps."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        own: Sequence[tuple[Tensor, Tensor]],
        seen: Tensor,
        segments: Sequence[Segment],
        window: int | None = None,
    ) -> Tensor:
        """Returns [N, heads, d] in the dtype of ``query``; softmax and sums are of at least float32.

        - ``query`` [N, heads, d]; ``key``, ``value`` [S, kv heads, d], grouped heads being neighbours;
        - ``own``: for each step 1 .. k the pair (key, value), each [N, kv heads, d];
        - ``seen`` int64 [N]: index in ``key`` of the last key that a query may see;
        - ``segments``: the rows, all of them and in order;
        - ``window``: how many keys of ``key`` a query may see, its last one among them, where a window says so; where it is not
          positive only the query's own keys are left.
        """


def on_device(kind: Kind, device: str) -> Kind:
    """``kind``, or rows where it names a kernel that learns on a GPU alone and ``device`` is none."""
    return kind if device == "cuda" or kind == "auto" else "rows"


def chosen(kind: Kind, device: str, fuse: bool = False) -> Attend:
    """The form that ``kind`` names; auto: flash on a GPU, row by row elsewhere. ``fuse`` lets flash use torch.compile."""
    if kind == "flash" or (kind == "auto" and device == "cuda"):
        from draftsmith.draft.attention_flash import flash_attention

        return partial(flash_attention, fuse=fuse) if fuse else flash_attention
    if kind == "flex":
        from draftsmith.draft.attention_flex import flex_attention

        return flex_attention
    from draftsmith.draft.attention_rows import rows_attention

    return rows_attention
