"""The loss: by hand, fast against eager, and what must not change it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.draft import loss as loss_module
from draftsmith.draft.config import DraftShape
from draftsmith.draft.loss import Loss, fast_loss
from draftsmith.draft.loss_eager import eager_loss
from draftsmith.draft.teacher import Teacher
from draftsmith.errors import DraftsmithError
from draftsmith.train_draft.dataset import Example
from draftsmith.train_draft.packing import Pack, collate


def test_by_hand(make_shape: Callable[..., DraftShape]) -> None:
    """Two tokens in the draft vocabulary, target ids 1 and 3 of 4; two slots, of which the first has a step more.

    The target's logits are its states: 0 for ids 1 and 3 in slot A, ln 3 and 0 in slot B, so p_A = (1/2, 1/2), p_B =
    (3/4, 1/4); its likeliest token is id 2 in A (outside) and 1 in B. The draft's logits are its states too.
    """
    shape = make_shape(hidden_size=4, target_vocab=4, draft_vocab=2)
    teacher = Teacher(shape, torch.eye(4), torch.tensor([1, 2]))
    final = torch.tensor([[0.0, 0.0, 5.0, 0.0], [0.0, math.log(3), 1.0, 0.0]])
    head = torch.eye(4)[:2]
    # Step 0: q_A = (1/2, 1/2), q_B = (1/4, 3/4). Step 1 of A learns from B: q = (4/5, 1/5).
    states = [torch.tensor([[0.0, 0, 9, 9], [0.0, math.log(3), 9, 9]]), torch.tensor([[math.log(4), 0.0, 9, 9]])]
    result = eager_loss(states, torch.tensor([2, 1]), final, head, teacher, torch.tensor([2, 1]), decay=0.5)
    first = math.log(2)
    second = -(3 / 4 * math.log(1 / 4) + 1 / 4 * math.log(3 / 4))
    third = -(3 / 4 * math.log(4 / 5) + 1 / 4 * math.log(1 / 5))
    assert result.sums.tolist() == pytest.approx([first + second, third])
    assert float(result.loss) == pytest.approx((first + second) / 2 + 0.5 * third)
    # A's own token is outside, so nothing can hit it; at step 0 B says id 3 and not 1; at step 1 A says 1, as the target.
    assert result.hits is not None
    assert [hits.tolist() for hits in result.hits] == [[False, False], [True]]


def _compute(loss: Callable[..., Loss], draft: Any, teacher: Teacher, pack: Pack, counts: Tensor, **more: Any) -> Any:
    states = draft(pack, 3)
    result = loss(states, pack.depth, pack.final, draft.lm_head.weight, teacher, counts, 0.8, **more)
    return result, dict(
        zip(dict(draft.named_parameters()), torch.autograd.grad(result.loss, list(draft.parameters())), strict=True)
    )


@pytest.mark.parametrize("block", [1 << 25, 12 * 4], ids=["one block", "blocks of four slots"])
def test_fast_equals_eager(
    block: int, shape: DraftShape, pack: Pack, make_draft: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "BLOCK", block)
    draft, teacher = make_draft(shape)
    fast, found = _compute(fast_loss, draft, teacher, pack, pack.counts, with_hits=True)
    eager, wanted = _compute(eager_loss, draft, teacher, pack, pack.counts)
    torch.testing.assert_close(fast.loss, eager.loss)
    torch.testing.assert_close(fast.sums, eager.sums)
    assert [hits.tolist() for hits in fast.hits] == [hits.tolist() for hits in eager.hits]
    assert any(hits.any() for hits in fast.hits)
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("block", [1 << 25, 12 * 4], ids=["one block", "blocks of four slots"])
def test_gradients_against_differences_in_float64(
    block: int, shape: DraftShape, pack: Pack, make_draft: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the head and of the states of every step, by torch.autograd.gradcheck."""
    monkeypatch.setattr(loss_module, "BLOCK", block)
    _, teacher = make_draft(shape)
    teacher.head, teacher.draft_head = teacher.head.double(), teacher.draft_head.double()
    random = torch.Generator().manual_seed(4)
    states = [
        torch.randn(count, 16, generator=random, dtype=torch.float64).mul_(0.5).requires_grad_()
        for count in pack.counts.tolist()
    ]
    head = torch.randn(12, 16, generator=random, dtype=torch.float64).mul_(0.5).requires_grad_()
    final = pack.final.double()

    def loss(head: Tensor, *states: Tensor) -> Tensor:
        return fast_loss(states, pack.depth, final, head, teacher, pack.counts, 0.8).loss

    assert torch.autograd.gradcheck(loss, (head, *states), fast_mode=True)
    eager = eager_loss(states, pack.depth, final, head, teacher, pack.counts, 0.8).loss
    found, expected = (torch.autograd.grad(value, (head, *states)) for value in (loss(head, *states), eager))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("term", [0, 1, 2])
def test_gradient_of_each_term(term: int, shape: DraftShape, pack: Pack, make_draft: Callable[..., Any]) -> None:
    """Of one step's term alone, through the whole draft: its slots divided by their count, no other step's."""
    draft, teacher = make_draft(shape)
    states = draft(pack, 3)
    # A count of 10^30 weighs a term by nothing.
    counts = torch.where(torch.arange(3) == term, pack.counts.double(), torch.tensor(1e30, dtype=torch.float64))
    loss = fast_loss(states, pack.depth, pack.final, draft.lm_head.weight, teacher, counts, 0.8).loss
    learnt_from = (pack.depth > term).nonzero().squeeze(1) + term
    wanted = teacher.logits(pack.final)[learnt_from].softmax(-1)
    plain = 0.8**term * -(wanted * draft.lm_head(states[term]).log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(loss, plain)
    parameters = list(draft.parameters())
    found = torch.autograd.grad(loss, parameters, retain_graph=True)
    expected = torch.autograd.grad(plain, parameters, allow_unused=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, torch.zeros_like(one) if other is None else other, atol=1e-6, rtol=1e-4)


def test_loss_is_float32_behind_bfloat16_products(
    make_shape: Callable[..., DraftShape], make_draft: Callable[..., Any]
) -> None:
    """Logits of a scale of 50: the loss is that of the rounded factors to float32's digits; rounded logits would be 0.1 off."""
    shape = make_shape()
    _, teacher = make_draft(shape)
    random = torch.Generator().manual_seed(8)
    state = torch.randn(30, 16, generator=random) * 4
    head = torch.randn(12, 16, generator=random) * 4
    final = torch.randn(30, 16, generator=random)
    depth, counts = torch.ones(30, dtype=torch.int64), torch.tensor([30])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = fast_loss([state], depth, final, head, teacher, counts, 1.0)
    assert result.loss.dtype == result.sums.dtype == torch.float32
    logits = state.bfloat16().double() @ head.bfloat16().double().t()
    wanted = teacher.logits(final).double().softmax(-1)
    exact = -(wanted * logits.log_softmax(-1)).sum(-1).mean()
    assert logits.abs().max() > 50
    assert result.loss.item() == pytest.approx(exact.item(), rel=1e-6)
    rounded = -(wanted * logits.bfloat16().double().log_softmax(-1)).sum(-1).mean()
    assert abs(rounded - exact) > 1e-3


def test_frozen_head_gets_no_gradient_and_the_rest_the_same(
    shape: DraftShape, pack: Pack, make_draft: Callable[..., Any]
) -> None:
    draft, teacher = make_draft(shape)
    _, wanted = _compute(eager_loss, draft, teacher, pack, pack.counts)
    draft.lm_head.weight.requires_grad_(False)
    states = draft(pack, 3)
    fast_loss(states, pack.depth, pack.final, draft.lm_head.weight, teacher, pack.counts, 0.8).loss.backward()
    assert draft.lm_head.weight.grad is None
    torch.testing.assert_close(draft.fc.weight.grad, wanted["fc.weight"], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("groups", [[[2, 0, 1]], [[0], [1], [2]], [[1, 2], [0]]])
def test_order_and_packing_do_not_change_the_loss(
    groups: list[list[int]], shape: DraftShape, examples: list[Example], pack: Pack, make_draft: Callable[..., Any]
) -> None:
    """A step of one pack equals a step of the same rows in other packs, in another order: shares of the group's counts."""
    draft, teacher = make_draft(shape)
    whole, wanted = _compute(fast_loss, draft, teacher, pack, pack.counts)
    packs = [collate([examples[row] for row in group], 3) for group in groups]
    counts = torch.stack([each.counts for each in packs]).sum(0)
    assert counts.tolist() == pack.counts.tolist() == [16, 12, 8]
    parts = [_compute(fast_loss, draft, teacher, each, counts) for each in packs]
    torch.testing.assert_close(sum(part.loss for part, _ in parts), whole.loss)
    for name in wanted:
        total = sum(gradients[name] for _, gradients in parts)
        torch.testing.assert_close(total, wanted[name], atol=1e-6, rtol=1e-4, msg=name)


def test_tokens_outside_of_spans_do_not_change_the_loss(
    shape: DraftShape, examples: list[Example], make_draft: Callable[..., Any], make_example: Callable[..., Example]
) -> None:
    """A row with 20 more tokens behind its last answer costs and counts the same."""
    draft, teacher = make_draft(shape)
    short = examples[0]
    long = make_example(shape, 37, [(3, 8), (11, 16)], 3, seed=1)
    for name in ("token_ids", "aux", "final"):
        getattr(long.states, name)[:17] = getattr(short.states, name)
    one, other = collate([short], 3), collate([long], 3)
    first, _ = _compute(fast_loss, draft, teacher, one, one.counts)
    second, _ = _compute(fast_loss, draft, teacher, other, other.counts)
    assert torch.equal(first.loss, second.loss)


def test_large_logits_stay_exact(make_shape: Callable[..., DraftShape]) -> None:
    """Logits of +-50: cross-entropy to a certain target that the draft contradicts is 100, not inf or nan."""
    shape = make_shape(hidden_size=2, target_vocab=2, draft_vocab=2)
    teacher = Teacher(shape, torch.eye(2), torch.tensor([0, 0]))
    states = [torch.tensor([[-50.0, 50.0]]).requires_grad_()]
    final = torch.tensor([[50.0, -50.0]])
    result = fast_loss(states, torch.tensor([1]), final, torch.eye(2), teacher, torch.tensor([1]), 1.0)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(100.0)
    torch.testing.assert_close(states[0].grad, torch.tensor([[-1.0, 1.0]]))


def test_teacher_scales_and_caps_logits(make_shape: Callable[..., DraftShape]) -> None:
    """Granite's factor 1/4 and Gemma's cap of 2: 2 tanh(8 * 0.25 / 2) = 2 tanh 1."""
    shape = make_shape(hidden_size=2, target_vocab=2, draft_vocab=2, logit_scale=0.25, logit_cap=2.0)
    teacher = Teacher(shape, torch.eye(2), torch.tensor([0, 0]))
    assert teacher.logits(torch.tensor([[8.0, 0.0]])).tolist()[0] == pytest.approx([2 * math.tanh(1), 0.0])


@pytest.mark.parametrize("d2t", [[0, -1], [0, 3], [-1, 0]], ids=["twice the same", "outside", "negative"])
def test_damaged_mapping_is_refused(d2t: list[int], make_shape: Callable[..., DraftShape]) -> None:
    with pytest.raises(DraftsmithError, match="map_vocabulary"):
        Teacher(make_shape(hidden_size=4, target_vocab=4, draft_vocab=2), torch.eye(4), torch.tensor(d2t))
