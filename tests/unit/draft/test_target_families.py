"""What a draft learns from is its target's own distribution, whatever the family does behind its head; tiny random targets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from draftsmith.config import Train
from draftsmith.draft.config import DraftShape, draft_shape
from draftsmith.draft.initial import initial_draft, target_head
from draftsmith.draft.teacher import Teacher
from draftsmith.target_weights import embedding_weight

# Every third token of 320, of which the tokenizer names 259: the rest is padding.
IDS = torch.arange(0, 320, 3)
D2T = IDS - torch.arange(len(IDS))
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 256}


def _shape(folder: Path, train: Train | None = None) -> DraftShape:
    return draft_shape(tiny.target(folder) | {"layers": [2, 3, 4]}, train or Train(), len(IDS))


def _run(folder: Path) -> tuple[Tensor, Tensor]:
    """transformers' own forward on 24 tokens: what goes into the head [24, H], and the logits [24, V]."""
    model = tiny.reference(folder)
    taken: list[Tensor] = []
    model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: taken.append(inputs[0][0]))
    ids = torch.randint(3, 259, (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(ids).logits[0]
    return taken[0], logits


@pytest.mark.parametrize(
    ("kind", "changes", "scale", "cap"),
    [
        ("llama", {}, 1.0, None),
        ("llama", {"tie_word_embeddings": True}, 1.0, None),
        ("llama", {"num_key_value_heads": 1, "head_dim": 64}, 1.0, None),
        ("granite", {}, 1 / 8, None),
        ("cohere", {"logit_scale": 0.3, "tie_word_embeddings": True}, 0.3, None),
        ("cohere2", {"logit_scale": 0.3, "tie_word_embeddings": True}, 0.3, None),
        ("gemma2", {"final_logit_softcapping": 1.5, "tie_word_embeddings": True}, 1.0, 1.5),
        ("gemma3_text", {"final_logit_softcapping": 1.5}, 1.0, 1.5),
        ("deepseek_v3", {}, 1.0, None),
        ("kimi_k25", {}, 1.0, None),
    ],
)
def test_teacher_says_what_the_target_says(
    kind: str, changes: dict[str, Any], scale: float, cap: float | None, tmp_path: Path
) -> None:
    folder = tiny.model(tmp_path / "model", kind, **changes)
    final, logits = _run(folder)
    shape = _shape(folder)
    assert (shape.logit_scale, shape.logit_cap) == (scale, cap)
    head = target_head(tiny.target(folder), shape)
    teacher = Teacher(shape, head, D2T)
    torch.testing.assert_close(teacher.logits(final), logits[:, IDS], atol=1e-5, rtol=0)
    # A forgotten scale or cap is far beyond the tolerance.
    if scale != 1.0 or cap is not None:
        assert float((final @ head[IDS].t() - logits[:, IDS]).abs().max()) > 0.1
    said = [int(token) // 3 if token % 3 == 0 else -1 for token in logits.argmax(-1)]
    assert teacher.choices(final).tolist() == said


@pytest.mark.parametrize(("kind", "changes"), [("granite", {}), ("cohere", {"logit_scale": 0.3})])
def test_new_head_has_the_targets_scale_in_it(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """A server scales a draft's logits only by a key of the draft's own config, which is not written."""
    folder = tiny.model(tmp_path / "model", kind, **changes)
    final, logits = _run(folder)
    shape = _shape(folder)
    head = target_head(tiny.target(folder), shape)
    draft = initial_draft(shape, embedding_weight(folder), head, D2T, seed=0)
    with torch.no_grad():
        torch.testing.assert_close(draft.lm_head(final), logits[:, IDS], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("kind", "changes", "heads"),
    [
        ("llama", {"num_key_value_heads": 1}, (4, 1, 32)),
        ("llama", {"num_key_value_heads": 4, "head_dim": 64}, (4, 4, 64)),
        ("gemma3_text", {}, (4, 2, 32)),
        # Latent attention has no heads that a Llama layer could have: one of 64 fills the width of 64.
        ("deepseek_v3", {}, (1, 1, 64)),
        ("kimi_k25", {}, (1, 1, 64)),
    ],
)
def test_heads_of_the_draft(kind: str, changes: dict[str, Any], heads: tuple[int, int, int], tmp_path: Path) -> None:
    shape = _shape(tiny.model(tmp_path / "model", kind, **changes))
    assert (shape.heads, shape.kv_heads, shape.head_dim) == heads
    assert shape.target_vocab == 320 > len(tiny.tokenizer())


@pytest.mark.parametrize("rope", [LLAMA3, YARN])
def test_draft_turns_as_its_target_does(rope: dict[str, Any], tmp_path: Path) -> None:
    folder = tiny.model(tmp_path / "model", "llama", rope_parameters=rope)
    of_target = tiny.reference(folder).model.rotary_emb
    shape = _shape(folder)
    draft = initial_draft(shape, torch.zeros(320, 64), torch.zeros(320, 64), D2T, seed=0)
    positions = torch.arange(0, 1000, 37)
    own = draft._rotation(positions, torch.zeros(1))
    theirs = of_target(torch.zeros(1), positions[None])
    for mine, wanted in zip(own, theirs, strict=True):
        torch.testing.assert_close(mine[:, 0], wanted[0], atol=1e-6, rtol=0)


def test_switches_of_eagle_3_1_reach_the_shape(tmp_path: Path) -> None:
    shape = _shape(tiny.model(tmp_path / "model"), Train(fc_norm=True, norm_output=True))
    assert (shape.fc_norm, shape.norm_output) == (True, True)
