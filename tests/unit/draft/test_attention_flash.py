"""Attention by FlashAttention: all but the kernel, which a GPU alone has (tests/gpu/test_training_gpu.py)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.draft import attention_flash
from draftsmith.draft.attention import Segment
from draftsmith.draft.attention_eager import eager_attention
from draftsmith.draft.attention_flash import Layout, flash_attention, layout
from draftsmith.draft.config import DraftShape
from draftsmith.train_draft.dataset import Example
from draftsmith.train_draft.packing import collate

# Rows of 9, 4, 6 and 7 keys. Queries end on the keys 3 4 6 8 (a gap, and the last key), none, 14 15 (not the last keys) and 25.
SEGMENTS = [Segment(0, 4, 0, 9, 3), Segment(4, 4, 9, 13, 11), Segment(4, 6, 13, 19, 14), Segment(6, 7, 19, 26, 23)]
SEEN = torch.tensor([3, 4, 6, 8, 14, 15, 25])
# One query for each key from the first seen one on: 6 + 2 + 5 + 3 places.
PLACES, SIZE = [0, 1, 3, 5, 8, 9, 15], 16


def _probabilities(query: Tensor, key: Tensor, at: Layout, window: int | None) -> tuple[Tensor, Tensor]:
    """exp(score) where a place sees a key and 0 elsewhere [heads, P, S], and the scores."""
    visible = torch.zeros(len(query), len(key), dtype=torch.bool)
    rows = zip(pairwise(at.query_bounds.tolist()), pairwise(at.key_bounds.tolist()), strict=True)
    for (first, last), (start, end) in rows:
        for place in range(first, last):
            seen = end - (last - place)
            visible[place, max(start, seen - window + 1 if window is not None else start) : seen + 1] = True
    scores = torch.einsum("phd,shd->hps", query, key) * query.shape[-1] ** -0.5
    return torch.where(visible, scores.exp(), 0.0), scores


@pytest.fixture(autouse=True)
def dense_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel as its documentation says it: forward, and backward from an output and a log-sum-exp that it is given."""

    def repeated(x: Tensor, query: Tensor) -> Tensor:
        return x.repeat_interleave(query.shape[1] // x.shape[1], 1)

    def forward(
        query: Tensor, key: Tensor, value: Tensor, at: Layout, window: int | None
    ) -> tuple[Tensor, Tensor, tuple[()]]:
        shares, _ = _probabilities(query, repeated(key, query), at, window)
        total = shares.sum(-1)
        return torch.einsum("hps,shd->phd", shares / total[..., None], repeated(value, query)), total.log().float(), ()

    def backward(
        gradient: Tensor,
        query: Tensor,
        out: Tensor,
        lse: Tensor,
        key: Tensor,
        value: Tensor,
        at: Layout,
        window: int | None,
        state: tuple[()],
    ) -> tuple[Tensor, Tensor, Tensor]:
        keys, values, scale = repeated(key, query), repeated(value, query), query.shape[-1] ** -0.5
        shares = _probabilities(query, keys, at, window)[0] * (-lse.t()).exp()[..., None]
        d_scores = (
            shares * (torch.einsum("phd,shd->hps", gradient, values) - (gradient * out).sum(-1).t()[..., None]) * scale
        )
        summed = [
            x.unflatten(1, (key.shape[1], -1)).sum(2)
            for x in (torch.einsum("hps,phd->shd", d_scores, query), torch.einsum("hps,phd->shd", shares, gradient))
        ]
        return torch.einsum("hps,shd->phd", d_scores, keys), *summed

    monkeypatch.setattr(attention_flash, "kernel_forward", forward)
    monkeypatch.setattr(attention_flash, "kernel_backward", backward)
    monkeypatch.setattr(attention_flash, "_takes", lambda query: True)


def test_queries_stand_for_the_last_keys_of_their_row() -> None:
    at = layout(SEEN, SEGMENTS)
    assert (at.places.tolist(), at.size) == (PLACES, SIZE)
    assert at.query_bounds.tolist() == [0, 6, 8, 13, 16]
    assert at.key_bounds.tolist() == [0, 9, 13, 19, 26]
    assert (at.longest_query, at.longest_key) == (6, 9)


# With a window of 0 a query sees its own keys alone, so that it must have one.
@pytest.mark.parametrize(
    ("own", "window"), [(0, None), (1, None), (3, None), (0, 1), (0, 3), (1, 0), (1, 1), (3, 0), (3, 3)]
)
def test_equals_the_mask_with_gradients(own: int, window: int | None) -> None:
    """Rows without a query, gaps, queries that are not on the last keys; own keys alone where the window leaves no other."""
    random = torch.Generator().manual_seed(5)

    def tensor(*size: int) -> Tensor:
        return torch.randn(*size, generator=random).requires_grad_()

    tensors = [tensor(7, 4, 8), tensor(26, 2, 8), tensor(26, 2, 8)]
    pairs = [(tensor(7, 2, 8), tensor(7, 2, 8)) for _ in range(own)]
    leaves = [*tensors, *(each for pair in pairs for each in pair)]
    out = flash_attention(*tensors, pairs, SEEN, SEGMENTS, window)
    expected = eager_attention(*tensors, pairs, SEEN, SEGMENTS, window)
    torch.testing.assert_close(out, expected)
    weight = torch.randn(out.shape, generator=random)
    found = torch.autograd.grad((out * weight).sum(), leaves)
    wanted = torch.autograd.grad((expected * weight).sum(), leaves)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_means_of_what_is_seen() -> None:
    """Equal scores average the numbers of the keys, and own ones (100): query 2 sees 0 .. 6, query 5 sees 13 14 15."""
    query, key = torch.zeros(7, 1, 8), torch.zeros(26, 1, 8)
    value = torch.arange(26.0)[:, None, None].expand(26, 1, 8)
    own = [(torch.zeros(7, 1, 8), torch.full((7, 1, 8), 100.0))]
    means = flash_attention(query, key, value, own, SEEN, SEGMENTS)[:, 0, 0]
    torch.testing.assert_close(means[2], torch.tensor(121 / 8))
    torch.testing.assert_close(means[5], torch.tensor(142 / 4))
    near = flash_attention(query, key, value, own, SEEN, SEGMENTS, 2)[:, 0, 0]
    torch.testing.assert_close(near[2], torch.tensor(111 / 3))


@pytest.mark.parametrize("window", [None, 2, 4])
def test_a_draft_computes_the_same_as_row_by_row(
    window: int | None, make_shape: Callable[..., DraftShape], make_draft: Callable[..., Any], examples: list[Example]
) -> None:
    """Rows of several spans; at later steps fewer slots count, in the end none of a row, and none of step 0 in the window."""
    draft, _ = make_draft(make_shape(attention_window=window))
    pack = collate(examples, 3)
    found = {}
    for kind in ("rows", "flash"):
        draft.prepare(kind, "cpu", False)
        states = draft(pack, 3)
        loss = sum(state.square().sum() for state in states)
        found[kind] = [
            *states,
            *torch.autograd.grad(loss, [p for n, p in draft.named_parameters() if n != "lm_head.weight"]),
        ]
    assert len(found["flash"]) > 10
    for one, other in zip(found["flash"], found["rows"], strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_what_the_kernel_does_not_take_goes_to_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32, wide heads, old GPUs, and no query at all; here without a GPU."""
    monkeypatch.undo()
    query, key = torch.zeros(7, 2, 8), torch.zeros(26, 2, 8)
    value = torch.arange(26.0)[:, None, None].expand(26, 2, 8)
    out = flash_attention(query, key, value, [], SEEN, SEGMENTS)
    torch.testing.assert_close(out[3, 0, 0], torch.tensor(4.0))
    assert flash_attention(query[:0], key, value, [], SEEN[:0], []).shape == (0, 2, 8)


@pytest.mark.parametrize(
    ("dtype", "width", "capable", "taken"),
    [
        (torch.bfloat16, 128, True, True),
        (torch.float16, 256, True, True),
        (torch.float32, 128, True, False),
        (torch.bfloat16, 512, True, False),
        (torch.bfloat16, 12, True, False),
        (torch.bfloat16, 128, False, False),
    ],
)
def test_what_the_kernel_takes(
    dtype: torch.dtype, width: int, capable: bool, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(attention_flash, "_newer_than_turing", lambda: capable)
    assert attention_flash._takes(torch.zeros(1, 1, width, dtype=dtype)) is taken
