"""Attention of the training-time test against one dense mask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftsmith.draft import attention
from draftsmith.draft.attention import Segment, dense_attention, prefix_attention

# Two rows: 3 queries on 5 keys, 2 queries on 4 keys, the second row's queries not on its last key.
SEGMENTS = [Segment(0, 3, 0, 5), Segment(3, 5, 5, 9)]
SEEN = torch.tensor([1, 2, 4, 6, 7])


def _inputs(own: int, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
    random = torch.Generator().manual_seed(7)

    def tensor(*size: int) -> Tensor:
        return torch.randn(*size, generator=random, dtype=dtype).requires_grad_()

    return [tensor(5, 4, 8), tensor(9, 2, 8), tensor(9, 2, 8)], [(tensor(5, 2, 8), tensor(5, 2, 8)) for _ in range(own)]


@pytest.mark.parametrize("own", [0, 1, 3])
@pytest.mark.parametrize("block", [1 << 25, 16])
def test_equals_dense_attention_with_gradients(own: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped heads, own keys of 0, 1 and 3 steps; block 16 makes every query a block of its own."""
    monkeypatch.setattr(attention, "BLOCK", block)
    (query, key, value), pairs = _inputs(own, torch.float32)
    leaves = [query, key, value, *(tensor for pair in pairs for tensor in pair)]
    out = prefix_attention(query, key, value, pairs, SEEN, SEGMENTS)
    expected = dense_attention(query, key, value, pairs, SEEN, SEGMENTS)
    torch.testing.assert_close(out, expected)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad((out * weight).sum(), leaves)
    wanted = torch.autograd.grad((expected * weight).sum(), leaves)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_a_query_sees_its_own_key_and_nobody_elses() -> None:
    """With value = the number of the key, equal scores average what is seen: query 1 sees keys 0 1 2 and its own 100."""
    query, key = torch.zeros(5, 1, 8), torch.zeros(9, 1, 8)
    value = torch.arange(9.0)[:, None, None].expand(9, 1, 8)
    own = [(torch.zeros(5, 1, 8), torch.full((5, 1, 8), 100.0))]
    out = prefix_attention(query, key, value, own, SEEN, SEGMENTS)[:, 0, 0]
    # Means of 0 1 100; 0 1 2 100; 0 .. 4 100; 5 6 100; 5 6 7 100.
    torch.testing.assert_close(out, torch.tensor([101 / 3, 103 / 4, 110 / 6, 111 / 3, 118 / 4]))


def test_bfloat16_stays_close() -> None:
    (query, key, value), pairs = _inputs(2, torch.float32)
    short = [tensor.detach().bfloat16() for tensor in (query, key, value)]
    short_pairs = [(one.detach().bfloat16(), other.detach().bfloat16()) for one, other in pairs]
    out = prefix_attention(*short, short_pairs, SEEN, SEGMENTS)
    assert out.dtype == torch.bfloat16
    expected = dense_attention(query, key, value, pairs, SEEN, SEGMENTS)
    torch.testing.assert_close(out.float(), expected.float(), atol=3e-2, rtol=3e-2)
