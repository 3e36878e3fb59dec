"""A draft that was trained, exported, loaded from its two files and run as a server runs it: token by token, with a key cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith import export_draft
from draftsmith.config import parse
from draftsmith.draft.config import draft_shape
from draftsmith.draft.initial import initial_draft, read_vocabulary
from draftsmith.draft.slots import counted_slots
from draftsmith.files import read_json, write_json
from draftsmith.rows import read_rows
from draftsmith.store import StoreReader
from draftsmith.train_draft.dataset import Example, Row
from draftsmith.train_draft.packing import collate
from plain_server import PlainServer, of_export

STEPS = 3


@dataclass
class Trained:
    """A trained draft as a server sees it, its report, and its validation rows with their states."""

    folder: Path
    report: dict[str, Any]
    settings: dict[str, Any]
    embedding: Tensor
    head: Tensor
    rows: list[tuple[Row, Any]]

    def server(self) -> tuple[PlainServer, Tensor]:
        return of_export(self.folder / "draft", self.embedding)


# What the config of a target with latent attention has, in small; values are narrower than keys.
LATENT = {
    "kv_lora_rank": 12, "q_lora_rank": 10, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16, "num_attention_heads": 3,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 2, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "all positions": {},
    "a window of 4": {"attention_window": 4},
    "latent attention": {"architecture": "mla"},
    "latent attention with plain rope": {"architecture": "mla"},
}


@pytest.fixture(params=list(KINDS))
def trained(make_run: Callable[..., Any], request: pytest.FixtureRequest) -> Trained:
    """Half trained, on answers that are the target's own greedy ones; a fifth of the tokens is outside the draft vocabulary."""
    run = make_run(validation=6)
    if "latent" in request.param:
        # Without a rank of the target's own the draft's queries have one all the same.
        plain = {"q_lora_rank": None, "rope_parameters": None, "rope_theta": 100.0} if "plain" in request.param else {}
        place = run.folder / "tiny" / "config.json"
        # Of a type that transformers does not know, so that it is read as it stands.
        write_json(place, read_json(place) | LATENT | plain | {"model_type": "latent_of_a_test"})
    kept = torch.tensor([token for token in range(48) if token % 5])
    save_file({"d2t": kept - torch.arange(len(kept))}, run.folder / "vocabulary.safetensors")
    settings = {
        "ttt_steps": STEPS,
        "max_steps": 25,
        "eval_steps": 100,
        "norm_output": True,
        **KINDS[request.param],
    }
    report = run.train(**settings)
    given = read_json(run.folder / "target.json") | {"max_positions": 256}
    write_json(run.folder / "target.json", given)
    export_draft.run(
        parse({"train": settings, "export": {"dtype": "float32"}}, "test"), target=run.folder / "target.json",
        draft=run.folder / "out" / "draft.safetensors", vocabulary=run.folder / "vocabulary.safetensors",
        train_report=run.folder / "out" / "train.json", folder=run.folder / "draft", report=run.folder / "draft" / "export.json",
    )  # fmt: skip
    table = read_rows(run.folder / "rows.parquet", ["row_id", "split", "span_starts", "span_ends", "length"])
    manifest = read_json(run.folder / "manifest.json")
    reader = StoreReader(Path(manifest["store"]), manifest["rows"])
    rows = [
        (Row(row, length, tuple(map(int, starts)), tuple(map(int, ends))), reader.row(row))
        for row, split, starts, ends, length in table[
            ["row_id", "split", "span_starts", "span_ends", "length"]
        ].to_numpy()
        if split == "validation"
    ]
    target = load_file(run.folder / "tiny" / "model.safetensors")
    return Trained(run.folder, report, settings, target["model.embed_tokens.weight"], target["lm_head.weight"], rows)


def _prefilled(trained: Trained, states: Any, slot: int) -> tuple[PlainServer, Tensor, Tensor, Tensor]:
    """A server that has taken tokens 1 .. ``slot`` with the target's states; its last logits, hidden state, and the draft's tokens."""
    server, tokens = trained.server()
    for place in range(1, slot + 1):
        out, hidden = server.step(int(states.token_ids[place]), server.combine(states.aux[place - 1]), place - 1)
    return server, out, hidden, tokens


def test_unrolled_steps_equal_the_exported_drafts_run(trained: Trained) -> None:
    """Every slot that counts of two rows, every step, along the row's tokens."""
    given = read_json(trained.folder / "target.json") | {"layers": trained.report["layers"]}
    d2t = read_vocabulary(trained.folder / "vocabulary.safetensors")
    shape = draft_shape(given, parse({"train": trained.settings}, "test").train, len(d2t))
    draft = initial_draft(shape, trained.embedding, trained.head, d2t, seed=0)
    draft.load_state_dict(load_file(trained.folder / "out" / "draft.safetensors"))
    examples = [
        Example(row, states, *counted_slots(row.starts, row.ends, row.length, STEPS)) for row, states in trained.rows
    ]
    pack = collate(examples[:2], STEPS)
    with torch.no_grad():
        logits = [draft.lm_head(state) for state in draft(pack, STEPS)]
    entry = [0] * STEPS
    for example in examples[:2]:
        for slot, depth in zip(example.slots.tolist(), example.depth.tolist(), strict=True):
            server, out, hidden, _ = _prefilled(trained, example.states, slot)
            for step in range(depth):
                if step:
                    place = slot + step
                    out, hidden = server.step(int(example.states.token_ids[place]), hidden, place - 1)
                torch.testing.assert_close(logits[step][entry[step]].double(), out, atol=5e-5, rtol=5e-4)
                entry[step] += 1
    assert entry == pack.counts.tolist()


def test_simulated_acceptance_length_is_that_of_real_drafting(trained: Trained) -> None:
    """The server drafts on its *own* tokens from the start of each answer, and goes on behind what the target accepts.

    Position k counts a draft whose tokens 0 .. k-1 were accepted and whose token k still lies in the answer; it is accepted
    when the target says the same token, of all that it knows.
    """
    tried, accepted, outside = [0] * STEPS, [0] * STEPS, 0
    for row, states in trained.rows:
        said = (states.final.double() @ trained.head.double().t()).argmax(-1).tolist()
        ids = states.token_ids.tolist()
        for start, end in zip(row.starts, row.ends, strict=True):
            assert said[start : end - 1] == ids[start + 1 : end]
            place = start
            while place < end - 1:
                server, out, hidden, tokens = _prefilled(trained, states, place)
                outside += said[place] not in tokens.tolist()
                taken = 0
                while taken < STEPS and place + taken < end - 1:
                    tried[taken] += 1
                    token = int(tokens[out.argmax()])
                    if token != said[place + taken]:
                        break
                    accepted[taken] += 1
                    taken += 1
                    out, hidden = server.step(token, hidden, place + taken - 1)
                place += taken + 1
    assert min(accepted) > 0
    assert outside > 0
    rates = [part / whole for part, whole in zip(accepted, tried, strict=True)]
    assert trained.report["acceptance"] == pytest.approx(rates)
    length = 1 + rates[0] + rates[0] * rates[1] + rates[0] * rates[1] * rates[2]
    assert trained.report["simulated_acceptance_length"] == pytest.approx(length)
    assert 1.2 < length < 0.9 * (STEPS + 1)
