"""Model, loss and gradients equal those of vllm-project/speculators 0.9 where the definitions agree.

They agree on one fully supervised row with the last token masked. They differ, and are not compared, in this:
- a span's last token counts there (it teaches what follows the end of a turn), and so do slots before a span at the steps
  whose target lies in it; here every token that a slot is given and asked for is the span's;
- targets are shifted over the whole pack there, so that the last slots of a row can learn from the next row;
- the mean there is over a process's pack, plus 1e-5; here over the whole optimiser step;
- the loss there is the KL divergence, here the cross-entropy: the target's entropy apart, with the same gradient;
- final states there are stored before the target's norm and normed again in training.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import speculators_reference as reference
import torch
from torch import Tensor

from draftsmith.draft.config import DraftShape
from draftsmith.draft.initial import initial_draft
from draftsmith.draft.loss import fast_loss
from draftsmith.draft.loss_eager import eager_loss
from draftsmith.draft.model import Eagle3Draft
from draftsmith.draft.slots import counted_slots
from draftsmith.draft.teacher import Teacher
from draftsmith.train_draft.dataset import Example, Row
from draftsmith.train_draft.packing import Pack, collate

FIGURES = json.loads(reference.FIGURES.read_text())
FLAGS: dict[str, dict[str, Any]] = {"default": {}, "3.1": {"fc_norm": True, "norm_output": True}}


def _setting(make_shape: Callable[..., DraftShape], flags: dict[str, Any]) -> tuple[Eagle3Draft, Teacher, Pack]:
    given, row = reference.target(), reference.row()
    d2t = given["kept"] - torch.arange(reference.DRAFT_VOCAB)
    shape = make_shape(**flags)
    draft = initial_draft(shape, given["embedding"], given["head"], d2t, seed=0)
    weights = reference.weights({name: tuple(tensor.shape) for name, tensor in draft.named_parameters()})
    draft.load_state_dict(weights)
    final = torch.nn.functional.rms_norm(row["last"], (16,), given["norm"], 1e-6)
    states = SimpleNamespace(token_ids=row["ids"].int(), aux=row["aux"], final=final)
    slots = counted_slots([0], [reference.LENGTH], reference.LENGTH, reference.STEPS)
    pack = collate([Example(Row("row", reference.LENGTH, (0,), (reference.LENGTH,)), states, *slots)], reference.STEPS)
    return draft, Teacher(shape, given["head"], d2t), pack


def _entropies(teacher: Teacher, pack: Pack) -> Tensor:
    """The target's entropy, mean over the slots of each step: what lies between cross-entropy and KL divergence."""
    of_slot = torch.distributions.Categorical(logits=teacher.logits(pack.final)).entropy()
    # Slot n learns from entry n + k at step k, of 10, 9 and 8 slots that count.
    return torch.stack([of_slot[step:].mean() for step in range(reference.STEPS)])


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("loss", [fast_loss, eager_loss], ids=["fast", "eager"])
def test_loss_and_gradients(flags: str, loss: Callable[..., Any], make_shape: Callable[..., DraftShape]) -> None:
    draft, teacher, pack = _setting(make_shape, FLAGS[flags])
    expected = FIGURES[flags]
    assert pack.counts.tolist() == [10, 9, 8]
    states = draft(pack, reference.STEPS)
    result = loss(states, pack.depth, pack.final, draft.lm_head.weight, teacher, pack.counts, decay=reference.DECAY)
    weight = reference.DECAY ** torch.arange(reference.STEPS)
    entropies = _entropies(teacher, pack)
    steps = weight * (result.sums / pack.counts - entropies)
    assert steps.tolist() == pytest.approx(expected["steps"], rel=1e-5)
    assert (result.loss - (weight * entropies).sum()).item() == pytest.approx(expected["loss"], rel=1e-5)
    result.loss.backward()
    parameters = dict(draft.named_parameters())
    assert set(parameters) == set(expected["gradients"])
    for name, parameter in parameters.items():
        assert parameter.grad is not None
        assert parameter.grad.norm().item() == pytest.approx(expected["gradients"][name]["norm"], rel=1e-4), name
        assert parameter.grad.flatten()[:4].tolist() == pytest.approx(
            expected["gradients"][name]["first"], rel=1e-3, abs=1e-5
        ), name
