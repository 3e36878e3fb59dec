"""Attention of the draft's layer by FlashAttention (https://arxiv.org/abs/2307.08691), on a GPU and in half precision.

The kernel that torch carries computes the keys of step 0: row by row in one launch, causal, and with the log-sum-exp of each
query. A query's own keys are a handful, and enter behind it. With s_j the score of a query with its own key of step j and
(o_0, l_0) what the kernel gives,

    l = log(exp(l_0) + sum over j of exp(s_j)),     o = exp(l_0 - l) o_0 + sum over j of exp(s_j - l) v_j

The gradient of a softmax needs of the keys only the output and the log-sum-exp. So the kernel's backward pass, given o and l
instead of its own o_0 and l_0, gives the gradients of the keys of step 0 as they are among all keys, as in attention that is
spread over several GPUs (https://arxiv.org/abs/2310.01889).

The kernel wants the queries of a row to stand for its last keys without a gap. Where slots between them do not count, their
places are filled with queries of zeros, whose gradients are zeros as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from draftsmith.draft.attention import Segment
from draftsmith.draft.attention_flex import flex_attention
from draftsmith.draft.transfer import moved

# The widest head that the kernel takes.
_WIDEST = 256


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own: Sequence[tuple[Tensor, Tensor]],
    seen: Tensor,
    segments: Sequence[Segment],
    window: int | None = None,
    fuse: bool = False,
) -> Tensor:
    """Arguments and result as :class:`draftsmith.draft.attention.Attend` has them; what the kernel cannot take goes to flex.

    ``fuse`` lets torch.compile make few kernels of what concerns the own keys.
    """
    if not len(query) or not _takes(query):
        return flex_attention(query, key, value, own, seen, segments, window)
    flat = [tensor for pair in own for tensor in pair]
    return _FlashAttention.apply(query, key, value, seen, tuple(segments), window, fuse, *flat)


def _takes(query: Tensor) -> bool:
    width = query.shape[-1]
    half = query.dtype in (torch.bfloat16, torch.float16)
    return half and width <= _WIDEST and width % 8 == 0 and _newer_than_turing()


@cache
def _newer_than_turing() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


@dataclass(frozen=True)
class Layout:
    """Where the kernel finds the queries and keys of each row: P places of queries, one for each key from the row's ``first_seen`` on."""

    places: Tensor
    """int64 [N]: the place of each query."""
    size: int
    """P."""
    query_bounds: Tensor
    """int32 [rows + 1]: where the places of each row begin and, last, end."""
    key_bounds: Tensor
    """int32 [rows + 1], alike."""
    longest_query: int
    longest_key: int


def layout(seen: Tensor, segments: Sequence[Segment]) -> Layout:
    """The layout for ``seen`` and ``segments`` of an attention."""
    widths = torch.tensor([segment.last_key - segment.first_seen for segment in segments])
    ends = widths.cumsum(0)
    shifts = ends - widths - torch.tensor([segment.first_seen for segment in segments])
    counts = torch.tensor([segment.last_query - segment.first_query for segment in segments])
    keys = torch.tensor([0, *(segment.last_key for segment in segments)], dtype=torch.int32)
    device = seen.device
    return Layout(
        seen + moved(shifts.repeat_interleave(counts), device),
        int(ends[-1]),
        moved(torch.cat([ends.new_zeros(1), ends]).int(), device),
        moved(keys, device),
        # For rows of a single query the kernel would take another way, and this is but an upper bound.
        max(int(widths.max()), 2),
        int(keys.diff().max()),
    )


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        seen: Tensor,
        segments: tuple[Segment, ...],
        window: int | None,
        fuse: bool,
        *own: Tensor,
    ) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            key, value = key.to(query.dtype).contiguous(), value.to(query.dtype).contiguous()
            at = layout(seen, segments)
            if window is None or window > 0:
                out, lse, ctx.state = kernel_forward(_spread(query, at), key, value, at, window)
                out, lse = _gathered(out, at), _gathered(lse.t(), at)
            else:
                # Attention to nothing.
                out, lse = torch.zeros_like(query), query.new_full(query.shape[:2], float("-inf"), dtype=torch.float32)
            if own:
                out, lse = _compiled(_with_own, fuse)(query, out, lse, *_stacked(own, query.dtype))
        ctx.save_for_backward(query, key, value, out, lse, *own)
        ctx.at, ctx.window, ctx.fuse = at, window, fuse
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, out, lse, *own = ctx.saved_tensors
        at: Layout = ctx.at
        with torch.autocast(query.device.type, enabled=False):
            gradient = gradient.to(query.dtype).contiguous()
            if ctx.window is None or ctx.window > 0:
                given, asked, gave, sums = (_spread(each, at) for each in (gradient, query, out, lse))
                d_query, d_key, d_value = kernel_backward(
                    given, asked, gave, sums, key, value, at, ctx.window, ctx.state
                )
                d_query = _gathered(d_query, at)
            else:
                d_query, d_key, d_value = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
            d_own: list[Tensor] = []
            if own:
                stacked = _stacked(own, query.dtype)
                d_query, d_keys, d_values = _compiled(_own_gradients, ctx.fuse)(
                    gradient, query, out, lse, *stacked, d_query
                )
                d_own = [each for pair in zip(d_keys, d_values, strict=True) for each in pair]
        return d_query, d_key, d_value, None, None, None, None, *d_own


def kernel_forward(
    query: Tensor, key: Tensor, value: Tensor, at: Layout, window: int | None
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Output [P, heads, d] and log-sum-exp [heads, P], float32, of queries [P, heads, d] over keys [S, kv heads, d].

    The third is what the backward pass wants to be given back: the state of a generator, which only dropout would use.

    The queries of a row stand for its last keys, and each sees the keys of its row up to its own one: ``window`` of them at most.
    """
    out, lse, seed, unused, _ = torch.ops.aten._flash_attention_forward(
        query, key, value, at.query_bounds, at.key_bounds, at.longest_query, at.longest_key, 0.0, True, False, **_near(window)
    )  # fmt: skip
    return out, lse, (seed, unused)


def kernel_backward(
    gradient: Tensor,
    query: Tensor,
    out: Tensor,
    lse: Tensor,
    key: Tensor,
    value: Tensor,
    at: Layout,
    window: int | None,
    state: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, for ``gradient`` [P, heads, d] of the output ``out`` with ``lse`` [P, heads]."""
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        gradient, query, key, value, out, lse.t().contiguous(), at.query_bounds, at.key_bounds, at.longest_query,
        at.longest_key, 0.0, True, *state, **_near(window),
    )  # fmt: skip
    return found


def _near(window: int | None) -> dict[str, int]:
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def _spread(x: Tensor, at: Layout) -> Tensor:
    """Rows [N, ...] at their places among P, zeros between them."""
    if len(x) == at.size:
        return x.contiguous()
    return x.new_zeros((at.size, *x.shape[1:])).index_copy_(0, at.places, x)


def _gathered(x: Tensor, at: Layout) -> Tensor:
    """The rows of the queries among ``x`` [P, ...]."""
    return x.contiguous() if len(at.places) == at.size else x.index_select(0, at.places)


def _stacked(own: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Own keys and own values of k steps, each [k, N, kv heads, d]."""
    return torch.stack([*own[0::2]]).to(dtype), torch.stack([*own[1::2]]).to(dtype)


def _with_own(query: Tensor, out: Tensor, lse: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """o and l as above, of o_0 ``out`` [N, heads, d] and l_0 ``lse`` [N, heads]."""
    kv_heads = keys.shape[2]
    scores = _own_scores(query, keys)
    before = lse.unflatten(1, (kv_heads, -1))
    top = torch.maximum(before, scores.amax(0))
    after = top + ((before - top).exp() + (scores - top).exp().sum(0)).log()
    mixed = (before - after).exp()[..., None] * out.unflatten(1, (kv_heads, -1)).float()
    mixed = mixed + ((scores - after).exp()[..., None] * values[:, :, :, None].float()).sum(0)
    return mixed.flatten(1, 2).to(out.dtype), after.flatten(1)


def _own_gradients(
    gradient: Tensor, query: Tensor, out: Tensor, lse: Tensor, keys: Tensor, values: Tensor, d_query: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """``d_query`` with what the own keys add to it, and the gradients of own keys and values."""
    kv_heads, scale = keys.shape[2], query.shape[-1] ** -0.5
    given, grouped = (x.unflatten(1, (kv_heads, -1)).float() for x in (gradient, query))
    # The softmax's Jacobian needs sum_j p_j dp_j over all keys, which equals dout . out.
    correction = (given * out.unflatten(1, (kv_heads, -1)).float()).sum(-1)
    weights = (_own_scores(query, keys) - lse.unflatten(1, (kv_heads, -1))).exp()
    d_scores = weights * ((given * values[:, :, :, None].float()).sum(-1) - correction) * scale
    added = (d_scores[..., None] * keys[:, :, :, None].float()).sum(0)
    d_keys = (d_scores[..., None] * grouped).sum(3)
    d_values = (weights[..., None] * given).sum(3)
    return (d_query + added.flatten(1, 2)).to(query.dtype), d_keys.to(keys.dtype), d_values.to(values.dtype)


def _own_scores(query: Tensor, keys: Tensor) -> Tensor:
    """Scaled scores of queries [N, heads, d] with own keys [k, N, kv heads, d]: [k, N, kv heads, group], float32."""
    grouped = query.unflatten(1, (keys.shape[2], -1)).float()
    return (grouped * keys[:, :, :, None].float()).sum(-1) * query.shape[-1] ** -0.5


@cache
def _fused(function: Any) -> Any:
    # Sizes change with every pack, so none is compiled in.
    return torch.compile(function, dynamic=True)


def _compiled(function: Any, fuse: bool) -> Any:
    return _fused(function) if fuse else function
