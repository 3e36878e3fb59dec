"""Attention of the training-time test against one dense mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.draft import attention_flex, attention_rows
from draftsmith.draft.attention import Attend, Segment, chosen
from draftsmith.draft.attention_eager import eager_attention
from draftsmith.draft.attention_flash import flash_attention
from draftsmith.draft.attention_flex import block_mask, flex_attention
from draftsmith.draft.attention_rows import rows_attention

# Two rows: 3 queries on 5 keys, 2 queries on 4 keys, the second row's queries not on its last key.
SEGMENTS = [Segment(0, 3, 0, 5, 1), Segment(3, 5, 5, 9, 6)]
SEEN = torch.tensor([1, 2, 4, 6, 7])


def _inputs(own: int, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
    random = torch.Generator().manual_seed(7)

    def tensor(*size: int) -> Tensor:
        return torch.randn(*size, generator=random, dtype=dtype).requires_grad_()

    return [tensor(5, 4, 8), tensor(9, 2, 8), tensor(9, 2, 8)], [(tensor(5, 2, 8), tensor(5, 2, 8)) for _ in range(own)]


@pytest.mark.parametrize("own", [0, 1, 3])
@pytest.mark.parametrize("block", [1 << 25, 16])
def test_equals_eager_attention_with_gradients(own: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped heads, own keys of 0, 1 and 3 steps; block 16 makes every query a block of its own."""
    monkeypatch.setattr(attention_rows, "BLOCK", block)
    (query, key, value), pairs = _inputs(own, torch.float32)
    leaves = [query, key, value, *(tensor for pair in pairs for tensor in pair)]
    out = rows_attention(query, key, value, pairs, SEEN, SEGMENTS)
    expected = eager_attention(query, key, value, pairs, SEEN, SEGMENTS)
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
    out = rows_attention(query, key, value, own, SEEN, SEGMENTS)[:, 0, 0]
    # Means of 0 1 100; 0 1 2 100; 0 .. 4 100; 5 6 100; 5 6 7 100.
    torch.testing.assert_close(out, torch.tensor([101 / 3, 103 / 4, 110 / 6, 111 / 3, 118 / 4]))


def test_bfloat16_stays_close() -> None:
    (query, key, value), pairs = _inputs(2, torch.float32)
    short = [tensor.detach().bfloat16() for tensor in (query, key, value)]
    short_pairs = [(one.detach().bfloat16(), other.detach().bfloat16()) for one, other in pairs]
    out = rows_attention(*short, short_pairs, SEEN, SEGMENTS)
    assert out.dtype == torch.bfloat16
    expected = eager_attention(query, key, value, pairs, SEEN, SEGMENTS)
    torch.testing.assert_close(out.float(), expected.float(), atol=3e-2, rtol=3e-2)


# Four rows of 90, 200, 40 and 150 keys, whose last 60, 170, 5 and 149 slots count: more than a block, and bounds inside of blocks.
ROWS = [(90, 60), (200, 170), (40, 5), (150, 149)]


def _long(own: int, grad: bool) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]], Tensor, list[Segment]]:
    random = torch.Generator().manual_seed(3)
    segments, seen, query, key = [], [], 0, 0
    for width, count in ROWS:
        segments.append(Segment(query, query + count, key, key + width, key + width - count))
        seen.append(torch.arange(key + width - count, key + width))
        query, key = query + count, key + width

    def tensor(count: int, heads: int) -> Tensor:
        return torch.randn(count, heads, 16, generator=random).requires_grad_(grad)

    pairs = [(tensor(query, 2), tensor(query, 2)) for _ in range(own)]
    return [tensor(query, 4), tensor(key, 2), tensor(key, 2)], pairs, torch.cat(seen), segments


@pytest.mark.parametrize(
    ("own", "window"), [(0, None), (0, 1), (0, 58), (0, 148), (2, None), (2, -1), (2, 58), (2, 148)]
)
def test_fused_kernel_equals_the_mask(own: int, window: int | None) -> None:
    """Torch's own kernel, uncompiled; on a CPU it has no backward pass. A window of -1 leaves no key of step 0."""
    tensors, pairs, seen, segments = _long(own, grad=False)
    with torch.no_grad():
        out = flex_attention(*tensors, pairs, seen, segments, window)
    torch.testing.assert_close(out, eager_attention(*tensors, pairs, seen, segments, window))


@pytest.mark.parametrize(
    ("window", "means"),
    [
        # Of 0 1 900; 1 2 900; 3 4 900; 5 6 900; 6 7 900.
        (2, [901 / 3, 903 / 3, 907 / 3, 911 / 3, 913 / 3]),
        # Of 0 1 900; 0 1 2 900; 2 3 4 900; 5 6 900, as key 4 is the other row's; 5 6 7 900.
        (3, [901 / 3, 903 / 4, 909 / 4, 911 / 3, 918 / 4]),
        (0, [900.0] * 5),
    ],
)
@pytest.mark.parametrize("attend", [rows_attention, flex_attention, eager_attention])
def test_a_window_narrows_what_a_query_sees(attend: Attend, window: int, means: list[float]) -> None:
    """Equal scores average the numbers of the keys seen: the last ones, but none before the row; own ones (900) always."""
    query, key = torch.zeros(5, 1, 16), torch.zeros(9, 1, 16)
    value = torch.arange(9.0)[:, None, None].expand(9, 1, 16)
    own = [(torch.zeros(5, 1, 16), torch.full((5, 1, 16), 900.0))]
    with torch.no_grad():
        out = attend(query, key, value, own, SEEN, SEGMENTS, window)[:, 0, 0]
    torch.testing.assert_close(out, torch.tensor(means))


@pytest.mark.parametrize("window", [0, 1, 2])
@pytest.mark.parametrize("block", [1 << 25, 16])
def test_gradients_with_a_window_are_those_of_the_mask(
    block: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_rows, "BLOCK", block)
    (query, key, value), pairs = _inputs(1, torch.float32)
    leaves = [query, key, value, *(tensor for pair in pairs for tensor in pair)]
    found, wanted = (
        torch.autograd.grad(attend(query, key, value, pairs, SEEN, SEGMENTS, window).square().sum(), leaves)
        for attend in (rows_attention, eager_attention)
    )
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    # Key 0 is seen by the first query, whose last key is 1, with a window of 2 alone.
    assert bool(found[1][0].any()) is (window == 2)


def test_gradients_through_the_fused_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is replaced by one that reads the block mask: padding and layout give every gradient back."""

    def dense(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=_visible(mask), enable_gqa=True
        )

    monkeypatch.setattr(attention_flex, "_kernel", lambda device: dense)
    tensors, pairs, seen, segments = _long(2, grad=True)
    leaves = [*tensors, *(tensor for pair in pairs for tensor in pair)]
    found = torch.autograd.grad(flex_attention(*tensors, pairs, seen, segments).square().sum(), leaves)
    wanted = torch.autograd.grad(eager_attention(*tensors, pairs, seen, segments).square().sum(), leaves)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def _visible(mask: Any) -> Tensor:
    """What a kernel computes, bool [queries, keys]: every key of the full blocks, and of the partial ones what the mask says."""

    def spread(count: Tensor, index: Tensor) -> Tensor:
        blocks = torch.zeros(index.shape[2], index.shape[3], dtype=torch.bool)
        for row in range(len(blocks)):
            blocks[row, index[0, 0, row, : int(count[0, 0, row])].long()] = True
        return blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)

    queries, keys = mask.seq_lengths
    query, place = torch.arange(queries)[:, None].expand(queries, keys), torch.arange(keys).expand(queries, keys)
    inside = mask.mask_mod(torch.tensor(0), torch.tensor(0), query, place)
    full = spread(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert bool(inside[full].all())
    return full | (spread(mask.kv_num_blocks, mask.kv_indices) & inside)


def test_block_mask_leaves_out_what_no_query_sees() -> None:
    """Rows of one block each: three diagonal blocks, and two more for each own key; one long row: a triangle, mostly full."""
    first = torch.arange(384) // 128 * 128
    separate = block_mask(first, torch.arange(384), 384, own=2)
    assert separate.kv_num_blocks.flatten().tolist() == [3, 3, 3]
    assert separate.full_kv_num_blocks.flatten().tolist() == [0, 0, 0]
    single = block_mask(torch.zeros(384, dtype=torch.int64), torch.arange(384), 384, own=0)
    assert single.kv_num_blocks.flatten().tolist() == [1, 1, 1]
    assert single.full_kv_num_blocks.flatten().tolist() == [0, 1, 2]


def test_block_mask_leaves_out_what_lies_before_the_window() -> None:
    """One row of three blocks: with 128 keys a query, two blocks at most, none of them whole; with 256, three and one whole."""
    last = torch.arange(384)
    near = block_mask((last - 127).clamp(min=0), last, 384, own=0)
    assert near.kv_num_blocks.flatten().tolist() == [1, 2, 2]
    assert near.full_kv_num_blocks.flatten().tolist() == [0, 0, 0]
    far = block_mask((last - 255).clamp(min=0), last, 384, own=0)
    assert far.kv_num_blocks.flatten().tolist() == [1, 1, 2]
    assert far.full_kv_num_blocks.flatten().tolist() == [0, 1, 1]


def test_padding_of_the_last_block_looks_no_further_than_its_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """500 queries with a window of 100: the block of queries 384 to 499 sees keys 285 to 499, of the blocks 2 and 3."""
    masks: list[Any] = []

    def keep(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
        masks.append(mask)
        return query

    monkeypatch.setattr(attention_flex, "_kernel", lambda device: keep)
    tensor, seen = torch.zeros(500, 1, 16), torch.arange(500)
    flex_attention(tensor, tensor, tensor, [], seen, [Segment(0, 500, 0, 500, 0)], 100)
    assert masks[0].kv_num_blocks.flatten().tolist() == [1, 2, 2, 2]
    assert masks[0].kv_indices[0, 0, 3, :2].tolist() == [2, 3]


def test_the_form_follows_the_device() -> None:
    assert chosen("auto", "cpu") is chosen("rows", "cuda") is rows_attention
    assert chosen("auto", "cuda") is chosen("flash", "cpu") is flash_attention
    assert chosen("flex", "cuda") is flex_attention
