"""Attention of the draft's layer row by row, on any device.

It goes in blocks of queries and keeps no scores for the backward pass: they are recomputed from the log-sum-exp, as
FlashAttention does (https://arxiv.org/abs/2205.14135). Memory is bounded by ``BLOCK``, rows never see each other, and nothing is
spent on padding: with rows of a few hundred tokens that is a few per cent of a training step on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftsmith.draft.attention import Segment

# Most scores (heads x queries x keys) held at once; 2**25 float32 are 128 MiB.
BLOCK = 1 << 25


def rows_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own: Sequence[tuple[Tensor, Tensor]],
    seen: Tensor,
    segments: Sequence[Segment],
    window: int | None = None,
) -> Tensor:
    """Arguments and result as :class:`draftsmith.draft.attention.Attend` has them."""
    flat = [tensor for pair in own for tensor in pair]
    return _RowsAttention.apply(query, key, value, seen, window, tuple(segments), *flat)


class _RowsAttention(torch.autograd.Function):
    """Inside, tensors are laid out [kv heads, N, group, d], so that a row is a view that one matrix product takes."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        seen: Tensor,
        window: int | None,
        segments: tuple[Segment, ...],
        *own: Tensor,
    ) -> Tensor:
        ctx.segments, ctx.window = segments, window
        with torch.autocast(query.device.type, enabled=False):
            q, k, v = (
                _grouped(query, key.shape[1]),
                key.transpose(0, 1).contiguous(),
                value.transpose(0, 1).contiguous(),
            )
            own_k, own_v = [t.transpose(0, 1) for t in own[0::2]], [t.transpose(0, 1) for t in own[1::2]]
            scale = query.shape[-1] ** -0.5
            own_scores = [_own_scores(q, each, scale) for each in own_k]
            out = torch.empty_like(q)
            lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
            for first, last, keys in _blocks(segments, q.shape[0] * q.shape[2]):
                scores = _scores(q, k, (seen, ctx.window), first, last, keys, scale)
                top = scores.amax(-1)
                for each in own_scores:
                    top = torch.maximum(top, each[:, first:last])
                weights = scores.sub_(top[..., None]).exp_()
                total = weights.sum(-1)
                mixed = _matmul(weights.to(v.dtype), v[:, keys], q.shape[2])
                for each, own_value in zip(own_scores, own_v, strict=True):
                    weight = (each[:, first:last] - top).exp_()
                    total += weight
                    mixed = torch.addcmul(mixed, weight[..., None], own_value[:, first:last, None].float())
                out[:, first:last] = (mixed / total[..., None]).to(out.dtype)
                lse[:, first:last] = total.log_().add_(top)
        ctx.save_for_backward(q, k, v, out, lse, seen, *own)
        return _ungrouped(out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse, seen, *own = ctx.saved_tensors
        group, scale = q.shape[2], q.shape[-1] ** -0.5
        with torch.autocast(q.device.type, enabled=False):
            d_out = _grouped(gradient, k.shape[0])
            # The softmax's Jacobian needs sum_j p_j dp_j, which equals dout . out.
            correction = (d_out.float() * out.float()).sum(-1)
            d_q = torch.zeros_like(q, dtype=torch.float32)
            d_k, d_v = torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
            for first, last, keys in _blocks(ctx.segments, q.shape[0] * group):
                scores = _scores(q, k, (seen, ctx.window), first, last, keys, scale)
                weights = scores.sub_(lse[:, first:last, :, None]).exp_()
                given = d_out[:, first:last]
                d_v[:, keys] += _matmul_transposed(weights.to(given.dtype), given)
                d_scores = _matmul(given, v[:, keys].transpose(1, 2), group)
                d_scores.sub_(correction[:, first:last, :, None]).mul_(weights).mul_(scale)
                d_scores_cast = d_scores.to(q.dtype)
                d_q[:, first:last] = _matmul(d_scores_cast, k[:, keys], group)
                d_k[:, keys] += _matmul_transposed(d_scores_cast, q[:, first:last])
            d_own: list[Tensor] = []
            for own_key, own_value in zip(own[0::2], own[1::2], strict=True):
                own_k, own_v = own_key.transpose(0, 1), own_value.transpose(0, 1)
                weight = (_own_scores(q, own_k, scale) - lse).exp_()
                d_weight = (d_out.float() * own_v[:, :, None].float()).sum(-1)
                d_score = weight * (d_weight - correction) * scale
                d_q += d_score[..., None] * own_k[:, :, None].float()
                d_own.append((d_score[..., None] * q.float()).sum(2).transpose(0, 1).to(own_key.dtype))
                d_own.append((weight[..., None] * d_out.float()).sum(2).transpose(0, 1).to(own_value.dtype))
        return (
            _ungrouped(d_q.to(q.dtype)),
            d_k.transpose(0, 1).to(k.dtype),
            d_v.transpose(0, 1).to(v.dtype),
            None,
            None,
            None,
            *d_own,
        )


def _grouped(tensor: Tensor, kv_heads: int) -> Tensor:
    """[N, heads, d] -> [kv heads, N, group, d], contiguous."""
    count, heads, width = tensor.shape
    return tensor.reshape(count, kv_heads, heads // kv_heads, width).transpose(0, 1).contiguous()


def _ungrouped(tensor: Tensor) -> Tensor:
    """[kv heads, N, group, d] -> [N, heads, d]."""
    return tensor.transpose(0, 1).flatten(1, 2)


def _blocks(segments: Sequence[Segment], heads: int) -> list[tuple[int, int, slice]]:
    """First query, last query and keys of each block whose scores fit into :data:`BLOCK`."""
    blocks = []
    for segment in segments:
        keys = slice(segment.first_key, segment.last_key)
        size = max(1, BLOCK // (heads * (segment.last_key - segment.first_key)))
        for first in range(segment.first_query, segment.last_query, size):
            blocks.append((first, min(first + size, segment.last_query), keys))
    return blocks


def _scores(
    q: Tensor, k: Tensor, bounds: tuple[Tensor, int | None], first: int, last: int, keys: slice, scale: float
) -> Tensor:
    """Scaled scores [kv heads, n, group, keys], float32; -inf where a key lies behind the query or before its window."""
    scores = _matmul(q[:, first:last], k[:, keys].transpose(1, 2), q.shape[2]).mul_(scale)
    (seen, window), places = bounds, torch.arange(keys.start, keys.stop, device=q.device)
    hidden = places > seen[first:last, None]
    if window is not None:
        hidden |= places <= seen[first:last, None] - window
    return scores.masked_fill_(hidden[None, :, None], float("-inf"))


def _own_scores(q: Tensor, own_key: Tensor, scale: float) -> Tensor:
    """Scaled score of each query with its own key [kv heads, N, d]: [kv heads, N, group], float32."""
    return (q.float() * own_key[:, :, None].float()).sum(-1).mul_(scale)


def _matmul(left: Tensor, right: Tensor, group: int) -> Tensor:
    """[h, n, group, a] x [h, a, b] -> float32 [h, n, group, b]."""
    heads, count, _, inner = left.shape
    return torch.bmm(left.reshape(heads, count * group, inner), right).float().view(heads, count, group, -1)


def _matmul_transposed(left: Tensor, right: Tensor) -> Tensor:
    """[h, n, group, a]^T x [h, n, group, b], summed over n and group -> float32 [h, a, b]."""
    return torch.bmm(left.flatten(1, 2).transpose(1, 2), right.flatten(1, 2)).float()
