"""Tiny drafts, targets and rows with random states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.draft.config import DraftShape
from draftsmith.draft.initial import initial_draft
from draftsmith.draft.model import Eagle3Draft
from draftsmith.draft.slots import counted_slots
from draftsmith.draft.teacher import Teacher
from draftsmith.train_draft.dataset import Example, Row
from draftsmith.train_draft.packing import Pack, collate


def make_shape(**changes: Any) -> DraftShape:
    """Width 16, 4 heads of 8 (so heads are wider than the model) on 2 key heads, vocabularies of 40 and 12."""
    values: dict[str, Any] = {
        "hidden_size": 16,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 24,
        "rms_norm_eps": 1e-6,
        "rope": {"rope_type": "default", "rope_theta": 10000.0},
        "max_positions": 128,
        "target_vocab": 40,
        "draft_vocab": 12,
        "layers": (1, 2, 3),
        "norm_before_residual": True,
        "fc_norm": False,
        "norm_output": False,
    }
    return DraftShape(**values | changes)


def make_draft(shape: DraftShape, seed: int = 0) -> tuple[Eagle3Draft, Teacher]:
    """A draft whose weights are all random (norms too), so that none can hide behind 1 or 0, and its teacher."""
    random = torch.Generator().manual_seed(seed + 100)
    head = torch.randn(shape.target_vocab, shape.hidden_size, generator=random)
    embedding = torch.randn(shape.target_vocab, shape.hidden_size, generator=random)
    ids = torch.randperm(shape.target_vocab, generator=random)[: shape.draft_vocab].sort().values
    d2t = ids - torch.arange(shape.draft_vocab)
    draft = initial_draft(shape, embedding, head, d2t, seed)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            noise = torch.randn(parameter.shape, generator=random)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else noise * 0.3)
    return draft, Teacher(shape, head, d2t)


def make_example(shape: DraftShape, length: int, spans: Sequence[tuple[int, int]], steps: int, seed: int) -> Example:
    """A row of ``length`` tokens with random states."""
    random = torch.Generator().manual_seed(seed)
    states = SimpleNamespace(
        token_ids=torch.randint(shape.target_vocab, (length,), generator=random, dtype=torch.int32),
        aux=torch.randn(length, len(shape.layers), shape.hidden_size, generator=random),
        final=torch.randn(length, shape.hidden_size, generator=random),
    )
    starts, ends = tuple(start for start, _ in spans), tuple(end for _, end in spans)
    return Example(Row(f"row-{seed}", length, starts, ends), states, *counted_slots(starts, ends, length, steps))


@pytest.fixture(name="make_shape")
def _make_shape() -> Callable[..., DraftShape]:
    return make_shape


@pytest.fixture(name="make_draft")
def _make_draft() -> Callable[..., tuple[Eagle3Draft, Teacher]]:
    return make_draft


@pytest.fixture(name="make_example")
def _make_example() -> Callable[..., Example]:
    return make_example


@pytest.fixture
def shape() -> DraftShape:
    return make_shape()


@pytest.fixture
def examples(shape: DraftShape) -> list[Example]:
    """Three rows for three steps: two spans, one short span, one span to the end."""
    return [
        make_example(shape, 17, [(3, 8), (11, 16)], 3, 1),
        make_example(shape, 6, [(2, 5)], 3, 2),
        make_example(shape, 11, [(4, 11)], 3, 3),
    ]


@pytest.fixture
def pack(examples: list[Example]) -> Pack:
    return collate(examples, 3)
