"""benchmarks/peer.py, as far as it needs neither speculators nor an engine."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.config import Train, parse
from draftsmith.errors import DraftsmithError
from draftsmith.train_draft.dataset import Row
from draftsmith.workflow import Plan

MODULES = ("arguments", "peer", "peer_training", "speculators_step")


@pytest.fixture
def benchmarks(repo: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The benchmark's modules; their folder goes behind all others on the path, and off it again."""
    before = list(sys.path)
    found = {}
    for name in MODULES:
        # A script finds its own folder first, and puts it last.
        monkeypatch.setattr(sys, "path", [str(repo / "benchmarks"), *before])
        found[name] = importlib.import_module(name)
    yield SimpleNamespace(**found)
    for name in MODULES:
        sys.modules.pop(name, None)


def evaluated(length: float, **domains: float) -> dict[str, Any]:
    per_domain = {name: {"prompts": 2, "acceptance_length": value, "drafts": 9} for name, value in domains.items()}
    return {
        "acceptance_length": length, "per_domain": per_domain, "k": 3, "temperature": 0.0, "prompts": 4, "outputs_equal": True,
        "sweep": [], "speedup": 1.5,
    }  # fmt: skip


def test_a_line_for_each_draft_and_the_ratio(benchmarks: SimpleNamespace) -> None:
    trained = {"tokens": 1000, "steps": 5, "seconds": 2.5, "params": 77, "history": []}
    ours = benchmarks.peer.line("ours", evaluated(2.4, chat=3.0, code=1.8), trained)
    peer = benchmarks.peer.line("speculators", evaluated(2.0, chat=2.0, code=2.0), trained | {"params": 70})
    assert ours == {
        "draft": "ours", "acceptance_length": 2.4, "per_domain": {"chat": 3.0, "code": 1.8}, "k": 3, "temperature": 0.0, "prompts": 4,
        "outputs_equal": True, "trained_tokens": 1000, "optimiser_steps": 5, "training_seconds": 2.5, "trained_weights": 77,
    }  # fmt: skip
    assert (peer["draft"], peer["trained_weights"]) == ("speculators", 70)
    assert benchmarks.peer.ratios(ours, peer) == {"ours_over_peer": 1.2, "per_domain": {"chat": 1.5, "code": 0.9}}


def test_figures_of_another_training_are_not_taken_for_this_ones(benchmarks: SimpleNamespace, tmp_path: Path) -> None:
    spec = {"config": {"name": "a"}, "results": "/run/results/a", "out": str(tmp_path), "training": "1234"}
    benchmarks.peer.check_out(tmp_path, spec)
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    benchmarks.peer.check_out(tmp_path, spec)
    for name, other in (("training", "5678"), ("config", {"name": "b"}), ("results", "/else")):
        with pytest.raises(
            DraftsmithError, match=rf"was made for another run \({name} differ\); give another folder as --out"
        ):
            benchmarks.peer.check_out(tmp_path, spec | {name: other})


def test_only_the_main_serving_is_measured_and_nothing_fails_for_a_low_figure(benchmarks: SimpleNamespace) -> None:
    given = {
        "k": 4, "max_tokens": 50, "temperature": 0.5, "ks": [1, 2], "temperatures": [1.0], "concurrency": [1], "untrained": True,
        "min_acceptance_length": 2.0,
    }  # fmt: skip
    plan = Plan(parse({"evaluate": given, "train": {"fc_norm": True}}, "test"))
    settings = json.loads(benchmarks.peer.evaluation_settings(plan))
    assert settings["evaluate"] == {
        "k": 4, "max_tokens": 50, "temperature": 0.5, "ks": [], "temperatures": [], "concurrency": [], "untrained": False,
        "min_acceptance_length": 1.0,
    }  # fmt: skip
    whole = json.loads(plan.settings("evaluate_draft"))
    assert {key: value for key, value in settings.items() if key != "evaluate"} == {
        key: value for key, value in whole.items() if key != "evaluate"
    }


def test_a_batch_is_shifted_as_speculators_shifts_it(benchmarks: SimpleNamespace) -> None:
    """Slot i takes x_i, g_(i-1) and y_i, and counts where x_i is supervised; the second row's states end with its answer."""
    rows = [(Row("a", 4, (2,), (4,)), states(4, 10)), (Row("b", 5, (1,), (3,)), states(3, 20))]
    batch, tokens = benchmarks.speculators_step.batch_of(rows, 5, torch.float32)
    assert tokens == 9
    assert batch["input_ids"].tolist() == [[11, 12, 13, 21, 22]]
    # Aux states are a hundred more than their token, final ones two hundred.
    assert batch["hidden_states"][0, :, 0].tolist() == [110, 111, 112, 120, 121]
    assert batch["hidden_states"].shape == (1, 5, 6)
    assert batch["verifier_last_hidden_states"][0, :, 1].tolist() == [211, 212, 213, 221, 222]
    assert batch["loss_mask"].tolist() == [[0, 1, 1, 1, 1]]
    assert batch["position_ids"].tolist() == [[1, 2, 3, 1, 2]]
    assert batch["document_ids"].tolist() == [[0, 0, 0, 1, 1]]
    assert batch["hidden_states"].dtype == torch.float32


def states(length: int, first: int) -> SimpleNamespace:
    """Tokens from ``first`` on, bfloat16 states of two numbers, three layers."""
    ids = torch.arange(first, first + length, dtype=torch.int32)
    aux, final = (ids + 100).bfloat16(), (ids + 200).bfloat16()
    return SimpleNamespace(token_ids=ids, aux=aux[:, None, None].expand(-1, 3, 2), final=final[:, None].expand(-1, 2))


def test_the_plan_is_the_run_s_own(benchmarks: SimpleNamespace) -> None:
    """Two packs a step as train.json notes, whatever is set; a step more than the config gives is another config's."""
    rows = [Row(str(number), 10, (0,), (10,)) for number in range(8)]
    given = Train(pack_tokens=20, epochs=1)
    plan = benchmarks.peer_training.plan_of(given, rows, {"packs_per_step": 2, "world_size": 1, "steps": 2})
    assert (plan.group, plan.steps) == (2, 2)
    assert sorted(number for pack in plan.packs for number in pack) == list(range(8))
    with pytest.raises(DraftsmithError, match="3 steps, its config of 2"):
        benchmarks.peer_training.plan_of(given, rows, {"packs_per_step": 2, "world_size": 1, "steps": 3})
