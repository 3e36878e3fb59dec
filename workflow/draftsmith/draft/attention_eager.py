"""Attention of the draft's layer as its definition reads: one dense mask over everything, differentiated by torch.

Nothing trains with it. It is what the fast forms are compared with, in values and in gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.draft.attention import Segment


def eager_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own: Sequence[tuple[Tensor, Tensor]],
    seen: Tensor,
    segments: Sequence[Segment],
    window: int | None = None,
) -> Tensor:
    """Arguments and result as :class:`draftsmith.draft.attention.Attend` has them; softmax in the dtype of ``query``."""
    repeat = query.shape[1] // key.shape[1]
    count, total = len(query), len(key)
    mask = torch.zeros(count, total, dtype=torch.bool, device=query.device)
    for segment in segments:
        mask[segment.first_query : segment.last_query, segment.first_key : segment.last_key] = True
    mask &= torch.arange(total, device=query.device) <= seen[:, None]
    if window is not None:
        mask &= torch.arange(total, device=query.device) > seen[:, None] - window
    diagonal = torch.eye(count, dtype=torch.bool, device=query.device)
    keys = torch.cat([key, *(pair[0] for pair in own)]).repeat_interleave(repeat, 1)
    values = torch.cat([value, *(pair[1] for pair in own)]).repeat_interleave(repeat, 1)
    scores = torch.einsum("nhd,shd->hns", query, keys) * query.shape[-1] ** -0.5
    scores = scores.masked_fill(~torch.cat([mask, *(diagonal for _ in own)], 1), float("-inf"))
    return torch.einsum("hns,shd->nhd", scores.softmax(-1), values)
