"""The draft's training step on an NVIDIA GPU: the fused forms against the readable ones. `pytest -m gpu tests/gpu`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.draft.attention import Attend, Segment, chosen
from draftsmith.draft.attention_eager import eager_attention
from draftsmith.draft.attention_flex import flex_attention
from draftsmith.draft.config import DraftShape
from draftsmith.draft.initial import initial_draft
from draftsmith.draft.latent import Latent
from draftsmith.draft.slots import counted_slots
from draftsmith.draft.teacher import Teacher
from draftsmith.train_draft.dataset import Example, Row
from draftsmith.train_draft.objective import Objective
from draftsmith.train_draft.packing import Pack, collate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

WIDTH, STEPS = 256, 4


@pytest.mark.parametrize(
    ("attend", "dtype", "close", "gradients_close"),
    [(flex_attention, torch.float32, 2e-3, 2e-3), (chosen("flash", "cuda", fuse=True), torch.bfloat16, 1e-2, 1e-2)],
    ids=["flex", "flash"],
)
@pytest.mark.parametrize("window", [None, 100, 0])
@pytest.mark.parametrize("own", [0, 3])
def test_fused_attention_equals_the_mask_with_gradients(
    own: int, window: int | None, attend: Attend, dtype: torch.dtype, close: float, gradients_close: float
) -> None:
    """Packs of other sizes one after the other, as in a training; compiled once for all of them."""
    if window == 0 and not own:
        pytest.skip("such a query sees nothing")
    for lengths in ([(90, 60), (200, 170), (700, 650)], [(300, 299), (77, 3)], [(1500, 1400)], [(5, 1), (9, 1)]):
        random = torch.Generator("cuda").manual_seed(0)
        segments, seen, query, key = [], [], 0, 0
        for width, count in lengths:
            # Every seventh slot does not count.
            counting = torch.tensor([place for place in range(width - count, width) if place % 7 or count == 1])
            segments.append(Segment(query, query + len(counting), key, key + width, key + int(counting[0])))
            seen.append(key + counting)
            count = len(counting)
            query, key = query + count, key + width

        def tensor(count: int, heads: int, random: torch.Generator = random) -> torch.Tensor:
            return torch.randn(count, heads, 64, generator=random, device="cuda", dtype=dtype).requires_grad_()

        tensors = [tensor(query, 8), tensor(key, 2), tensor(key, 2)]
        pairs = [(tensor(query, 2), tensor(query, 2)) for _ in range(own)]
        leaves = [*tensors, *(each for pair in pairs for each in pair)]
        exact = [each.detach().double().requires_grad_() for each in leaves]
        where = (torch.cat(seen).cuda(), segments, window)
        out = attend(*tensors, pairs, *where)
        expected = eager_attention(*exact[:3], list(zip(exact[3::2], exact[4::2], strict=True)), *where)
        assert _apart(out, expected) < close
        weight = torch.randn(out.shape, generator=random, device="cuda").to(dtype)
        found = torch.autograd.grad((out * weight).sum(), leaves)
        wanted = torch.autograd.grad((expected * weight).sum(), exact)
        for one, other in zip(found, wanted, strict=True):
            assert _apart(one, other) < gradients_close


def _apart(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Size of the difference as a share of the size of ``exact``; 0 where both are 0."""
    found, exact = found.detach(), exact.detach()
    return float((found - exact).norm() / exact.norm().clamp(min=1e-30)) if found.any() or exact.any() else 0.0


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


# Queries and keys of 192 as DeepSeek's, values narrower.
LATENT = Latent(q_lora_rank=96, kv_lora_rank=128, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)


def _objective(attention: Any, fuse: bool, latent: Latent | None = None) -> Objective:
    heads = {"kv_heads": 2, "head_dim": 64} if latent is None else {"kv_heads": 4, "head_dim": 192, "latent": latent}
    shape = DraftShape(
        hidden_size=WIDTH, heads=4, **heads, intermediate_size=512, rms_norm_eps=1e-6,
        rope={"rope_type": "default", "rope_theta": 10000.0}, max_positions=4096, target_vocab=1000, draft_vocab=600,
        layers=(1, 2, 3), norm_before_residual=True, fc_norm=False, norm_output=False,
    )  # fmt: skip
    random = torch.Generator().manual_seed(0)
    head, d2t = torch.randn(1000, WIDTH, generator=random, dtype=torch.bfloat16) * 0.1, torch.zeros(600).long()
    draft = initial_draft(shape, head, head, d2t, seed=1)
    draft.prepare(attention, "cuda", fuse)
    return Objective(draft, Teacher(shape, head, d2t), STEPS, 0.8, torch.bfloat16, fuse).cuda()


@pytest.mark.parametrize(
    ("attention", "latent"), [("flash", None), ("flex", None), ("flash", LATENT)], ids=["flash", "flex", "flash-latent"]
)
def test_fused_training_step_equals_the_plain_one(attention: str, latent: Latent | None) -> None:
    """Loss and gradients of packs of several sizes, in bfloat16: fused attention and compiled parts against rows and eager."""
    plain, fused = _objective("rows", False, latent), _objective(attention, True, latent)
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
