"""The draft's training step on an NVIDIA GPU: the fused forms against the readable ones. `pytest -m gpu tests/gpu`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.draft.attention import Segment
from draftsmith.draft.attention_eager import eager_attention
from draftsmith.draft.attention_flex import flex_attention
from draftsmith.draft.config import DraftShape
from draftsmith.draft.initial import initial_draft
from draftsmith.draft.slots import counted_slots
from draftsmith.draft.teacher import Teacher
from draftsmith.train_draft.dataset import Example, Row
from draftsmith.train_draft.objective import Objective
from draftsmith.train_draft.packing import Pack, collate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

WIDTH, STEPS = 256, 4


@pytest.mark.parametrize("own", [0, 3])
def test_flex_attention_equals_the_mask_with_gradients(own: int) -> None:
    """Packs of other sizes one after the other, as in a training; compiled once for all of them."""
    for lengths in ([(90, 60), (200, 170), (700, 650)], [(300, 299), (77, 3)], [(1500, 1400)]):
        random = torch.Generator("cuda").manual_seed(0)
        segments, seen, query, key = [], [], 0, 0
        for width, count in lengths:
            segments.append(Segment(query, query + count, key, key + width))
            seen.append(torch.arange(key + width - count, key + width))
            query, key = query + count, key + width

        def tensor(count: int, heads: int, random: torch.Generator = random) -> torch.Tensor:
            return torch.randn(count, heads, 64, generator=random, device="cuda").requires_grad_()

        tensors = [tensor(query, 8), tensor(key, 2), tensor(key, 2)]
        pairs = [(tensor(query, 2), tensor(query, 2)) for _ in range(own)]
        given = (*tensors, pairs, torch.cat(seen).cuda(), segments)
        leaves = [*tensors, *(each for pair in pairs for each in pair)]
        out, expected = flex_attention(*given), eager_attention(*given)
        torch.testing.assert_close(out, expected, atol=5e-3, rtol=5e-3)
        weight = torch.randn(out.shape, generator=random, device="cuda")
        found = torch.autograd.grad((out * weight).sum(), leaves)
        wanted = torch.autograd.grad((expected * weight).sum(), leaves)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


def _pack(seed: int, lengths: list[int], shape: DraftShape) -> Pack:
    random = torch.Generator().manual_seed(seed)
    examples = []
    for number, length in enumerate(lengths):
        states = SimpleNamespace(
            token_ids=torch.randint(shape.target_vocab, (length,), generator=random, dtype=torch.int32),
            aux=torch.randn(length, 3, WIDTH, generator=random, dtype=torch.bfloat16),
            final=torch.randn(length, WIDTH, generator=random, dtype=torch.bfloat16),
        )
        row = Row(str(number), length, (length // 3,), (length,))
        examples.append(Example(row, states, *counted_slots(row.starts, row.ends, length, STEPS)))
    return collate(examples, STEPS)


def _objective(attention: Any, fuse: bool) -> Objective:
    shape = DraftShape(
        hidden_size=WIDTH, heads=4, kv_heads=2, head_dim=64, intermediate_size=512, rms_norm_eps=1e-6,
        rope={"rope_type": "default", "rope_theta": 10000.0}, max_positions=4096, target_vocab=1000, draft_vocab=600,
        layers=(1, 2, 3), norm_before_residual=True, fc_norm=False, norm_output=False,
    )  # fmt: skip
    random = torch.Generator().manual_seed(0)
    head, d2t = torch.randn(1000, WIDTH, generator=random, dtype=torch.bfloat16) * 0.1, torch.zeros(600).long()
    draft = initial_draft(shape, head, head, d2t, seed=1)
    draft.prepare(attention, "cuda", fuse)
    return Objective(draft, Teacher(shape, head, d2t), STEPS, 0.8, torch.bfloat16, fuse).cuda()


def test_fused_training_step_equals_the_plain_one() -> None:
    """Loss and gradients of packs of several sizes, in bfloat16: flex attention and compiled parts against rows and eager."""
    plain, fused = _objective("rows", False), _objective("flex", True)
    for seed, lengths in enumerate(([300, 500, 100], [900], [64, 64, 64, 700])):
        pack = _pack(seed, lengths, plain.draft.shape)
        results = []
        for objective in (plain, fused):
            result = objective(pack.to("cuda"), pack.counts, True)
            results.append((result, torch.autograd.grad(result.loss, list(objective.draft.parameters()))))
        (one, wanted), (other, found) = results
        torch.testing.assert_close(other.loss, one.loss, atol=1e-3, rtol=1e-3)
        assert other.loss.dtype == torch.float32
        for (name, _), gradient, expected in zip(plain.draft.named_parameters(), found, wanted, strict=True):
            error = (gradient - expected).norm() / expected.norm()
            assert error < 0.03, f"{name}: {error:.3f}"
