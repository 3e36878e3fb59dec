"""The unrolled draft against a server's token-by-token run, and rows against each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.draft.config import DraftShape
from draftsmith.draft.loss import fast_loss
from draftsmith.draft.model import Eagle3Draft
from draftsmith.train_draft.dataset import Example
from draftsmith.train_draft.packing import Pack, collate
from plain_server import PlainServer

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _logits(draft: Eagle3Draft, pack: Pack, steps: int) -> list[Tensor]:
    return [draft.lm_head(state) for state in draft(pack, steps)]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_before_residual": False},
        {"fc_norm": True, "norm_output": True},
        {"rope": LLAMA3, "heads": 2, "kv_heads": 1, "layers": (1, 3)},
        {"attention_window": 5},
        {"attention_window": 2},
        {"attention_window": 1},
    ],
    ids=[
        "default",
        "plain residual",
        "EAGLE-3.1 norms",
        "llama3 rope, one key head, two layers",
        "window",
        "window shorter than the draft",
        "window of the token itself",
    ],
)
def test_unrolled_steps_equal_a_servers_token_by_token_run(
    changes: dict[str, Any],
    make_shape: Callable[..., DraftShape],
    make_draft: Callable[..., Any],
    make_example: Callable[..., Example],
) -> None:
    """For every counted slot: prefill up to it with the target's states, then draft on the row's tokens, states fed back."""
    shape, steps = make_shape(**changes), 4
    draft, _ = make_draft(shape)
    example = make_example(shape, 15, [(2, 6), (8, 15)], steps, seed=5)
    logits = _logits(draft, collate([make_example(shape, 9, [(3, 9)], steps, seed=6), example], steps), steps)
    in_first = 5
    tokens = example.states.token_ids.tolist()
    checked = 0
    for number, (slot, depth) in enumerate(zip(example.slots.tolist(), example.depth.tolist(), strict=True)):
        server = PlainServer(dict(draft.named_parameters()), draft.embed_tokens, shape)
        for earlier in range(1, slot + 1):
            out, hidden = server.step(tokens[earlier], server.combine(example.states.aux[earlier - 1]), earlier - 1)
        for step in range(depth):
            if step:
                out, hidden = server.step(tokens[slot + step], hidden, slot + step - 1)
            # Entries of a step: those of the first row that reach it (depths 4 4 3 2 1 -> 5 4 3 2), then this row's.
            before = in_first - step + sum(int(deep > step) for deep in example.depth.tolist()[:number])
            torch.testing.assert_close(logits[step][before].double(), out, atol=2e-5, rtol=2e-4)
            checked += 1
    # Spans of 4 and 7 tokens: depths 3 2 1 and 4 4 4 3 2 1 (6 = at most 4).
    assert checked == 6 + 18


def test_rows_of_a_pack_do_not_see_each_other(
    shape: DraftShape, examples: list[Example], make_draft: Callable[..., Any], make_example: Callable[..., Example]
) -> None:
    """Logits of a row, and the gradients that it causes, are the same alone and between other rows."""
    draft, _ = make_draft(shape)
    alone = collate([examples[1]], 3)
    stranger = make_example(shape, 13, [(1, 12)], 3, seed=9)
    packed = collate([examples[0], examples[1], stranger], 3)

    def row_and_gradients(pack: Pack, offsets: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        mine = [
            logits[offset : offset + count]
            for logits, offset, count in zip(_logits(draft, pack, 3), offsets, alone.counts.tolist(), strict=False)
        ]
        total = sum((logits.square().sum() for logits in mine), torch.zeros(()))
        return mine, list(torch.autograd.grad(total, list(draft.parameters())))

    assert alone.counts.tolist() == [2, 1, 0]
    # Slots of the first row that count at steps 0 and 1: spans of 5 and 5 tokens.
    logits, gradients = row_and_gradients(packed, [8, 6])
    expected, wanted = row_and_gradients(alone, [0, 0])
    assert len(logits) == len(expected) == 2
    for one, other in zip(logits, expected, strict=True):
        torch.testing.assert_close(one, other)
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_later_tokens_do_not_reach_earlier_slots(
    shape: DraftShape, examples: list[Example], make_draft: Callable[..., Any]
) -> None:
    """Another token and another state at position 9 change slots from there on, and none before, at no step."""
    draft, _ = make_draft(shape)
    example = examples[2]
    before = _logits(draft, collate([example], 3), 3)
    example.states.token_ids[9] = (example.states.token_ids[9] + 1) % shape.target_vocab
    example.states.aux[9] += 1
    after = _logits(draft, collate([example], 3), 3)
    # Slot 4 is the first; the token of position 9 enters at step 0 at slot 9, at step 1 at slot 8, at step 2 at slot 7.
    for step, first_changed in enumerate([5, 4, 3]):
        assert torch.equal(before[step][:first_changed], after[step][:first_changed])
        assert not torch.equal(before[step][first_changed], after[step][first_changed])


def test_parameters_are_what_vllm_loads(shape: DraftShape, make_draft: Callable[..., Any]) -> None:
    draft, _ = make_draft(shape)
    assert {name: tuple(tensor.shape) for name, tensor in draft.state_dict().items()} == {
        "fc.weight": (16, 48),
        "layers.0.input_layernorm.weight": (16,),
        "layers.0.hidden_norm.weight": (16,),
        "layers.0.post_attention_layernorm.weight": (16,),
        "layers.0.self_attn.q_proj.weight": (32, 32),
        "layers.0.self_attn.k_proj.weight": (16, 32),
        "layers.0.self_attn.v_proj.weight": (16, 32),
        "layers.0.self_attn.o_proj.weight": (16, 32),
        "layers.0.mlp.gate_proj.weight": (24, 16),
        "layers.0.mlp.up_proj.weight": (24, 16),
        "layers.0.mlp.down_proj.weight": (16, 24),
        "norm.weight": (16,),
        "lm_head.weight": (12, 16),
    }


def test_nothing_of_a_neighbour_reaches_a_row(
    shape: DraftShape, examples: list[Example], make_draft: Callable[..., Any], make_example: Callable[..., Example]
) -> None:
    """Other tokens and states in the row before and behind: this row's logits, loss and gradients are the same to the bit."""
    draft, teacher = make_draft(shape)
    mine = examples[2]
    found = []
    for seed in (21, 22):
        # Supervised from their first token on: there a shifted target would lend its slots to the row before.
        before, behind = (make_example(shape, 9, [(0, 9)], 3, seed + more) for more in (0, 10))
        pack = collate([before, mine, behind], 3)
        states = draft(pack, 3)
        # Of the row before count 7, 6 and 5 slots, of this one 6, 5 and 4.
        own = [state[start : start + count] for state, start, count in zip(states, (7, 6, 5), (6, 5, 4), strict=True)]
        alone = collate([mine], 3)
        loss = fast_loss(own, alone.depth, alone.final, draft.lm_head.weight, teacher, alone.counts, 0.8).loss
        whole = fast_loss(states, pack.depth, pack.final, draft.lm_head.weight, teacher, pack.counts, 0.8).loss
        found.append(
            (
                [*own, loss, *torch.autograd.grad(loss, list(draft.parameters()), retain_graph=True)],
                whole,
                states[0][:7],
            )
        )
    (first, other_loss, other_states), (second, changed_loss, changed_states) = found
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(other_loss, changed_loss)
    assert not torch.equal(other_states, changed_states)
