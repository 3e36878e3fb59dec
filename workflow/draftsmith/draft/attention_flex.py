"""Attention of the draft's layer as one fused kernel: torch's flex_attention (https://arxiv.org/abs/2412.05496) with a block mask.

Keys of step 0 and own keys of the later steps are laid end to end, each part padded to whole blocks. The block mask is
computed from the rows' bounds, block by block, and never from a mask of queries x keys. Compiled on a GPU; as torch's kernel
has no backward pass on a CPU, it is only compared there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.attention.flex_attention import flex_attention as _torch_flex

from draftsmith.draft.attention import Segment
from draftsmith.draft.attention_rows import rows_attention

# Queries and keys of a block of the mask; torch's own default, and what its kernels are tuned for.
_SIDE = 128


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own: Sequence[tuple[Tensor, Tensor]],
    seen: Tensor,
    segments: Sequence[Segment],
    window: int | None = None,
) -> Tensor:
    """Arguments and result as :class:`draftsmith.draft.attention.Attend` has them."""
    count = len(query)
    if not count:
        # Nothing to compute, but every weight on the way here still gets a gradient of zeros.
        return rows_attention(query, key, value, own, seen, segments, window)
    queries, keys = _padded(count), _padded(len(key))
    first = torch.repeat_interleave(
        torch.tensor([segment.first_key for segment in segments]),
        torch.tensor([segment.last_query - segment.first_query for segment in segments]),
    ).to(seen.device, non_blocking=True)
    if window is not None:
        first = torch.maximum(first, seen + 1 - window)
    # A query of the padding sees the key that the last query ends with: one without any key would be no number, and another
    # key might lie far from what its block sees. Nobody reads its output.
    padding = seen[-1:].expand(queries - count)
    mask = block_mask(torch.cat([first, padding]), torch.cat([seen, padding]), keys, len(own))
    out = _kernel(query.device.type)(
        _laid_out([(query, queries)]),
        _laid_out([(key, keys), *((pair[0], queries) for pair in own)]).to(query.dtype),
        _laid_out([(value, keys), *((pair[1], queries) for pair in own)]).to(query.dtype),
        mask,
    )
    return out[0, :, :count].transpose(0, 1)


def block_mask(first: Tensor, last: Tensor, keys: int, own: int) -> BlockMask:
    """The mask of queries that see the keys ``first`` .. ``last`` (int64 [queries]) of ``keys``, and ``own`` diagonals behind them.

    The number of queries and ``keys`` are whole blocks. A query whose ``first`` lies behind its ``last`` sees its diagonals alone.
    """
    queries = len(first)
    # Sizes are told by tensors, not numbers: a number would be compiled in, and every pack has other ones.
    owner = torch.cat([first.new_full((keys,), -1), torch.arange(queries, device=first.device).repeat(own)])

    def visible(batch: Tensor, head: Tensor, query: Tensor, place: Tensor) -> Tensor:
        return ((place >= first[query]) & (place <= last[query])) | (owner[place] == query)

    firsts, lasts = first.view(-1, _SIDE), last.view(-1, _SIDE)
    start = torch.arange(0, keys, _SIDE, device=first.device)
    end = start + _SIDE - 1
    # Rows lie end to end, so what the queries of a block see is one stretch of keys, and what all of them see is another.
    touched = (end >= firsts.amin(1, keepdim=True)) & (start <= lasts.amax(1, keepdim=True))
    whole = (start >= firsts.amax(1, keepdim=True)) & (end <= lasts.amin(1, keepdim=True))
    diagonal = torch.eye(queries // _SIDE, dtype=torch.bool, device=first.device).repeat(1, own)
    return BlockMask.from_kv_blocks(
        *_listed(torch.cat([touched & ~whole, diagonal], 1)),
        *_listed(torch.cat([whole, torch.zeros_like(diagonal)], 1)),
        BLOCK_SIZE=_SIDE,
        mask_mod=visible,
        seq_lengths=(queries, keys + own * queries),
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many key blocks each query block has, int32 [1, 1, q], and which, int32 [1, 1, q, k], for bool [q, k]."""
    order = torch.argsort(blocks.byte(), dim=1, descending=True, stable=True)
    return blocks.sum(1, dtype=torch.int32)[None, None], order.int()[None, None]


def _padded(count: int) -> int:
    return -(-count // _SIDE) * _SIDE


def _laid_out(parts: Sequence[tuple[Tensor, int]]) -> Tensor:
    """Parts [n, heads, d], each padded with zeros to its length, end to end: [1, heads, sum, d]."""
    return torch.cat([functional.pad(part, (0, 0, 0, 0, 0, size - len(part))) for part, size in parts]).transpose(0, 1)[
        None
    ]


def _call(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Any:
    return _torch_flex(query, key, value, block_mask=mask, enable_gqa=query.shape[1] != key.shape[1])


@cache
def _kernel(device: str) -> Any:
    """Compiled on a GPU; sizes change with every pack, so none is compiled in."""
    return torch.compile(_call, dynamic=True) if device == "cuda" else _call
