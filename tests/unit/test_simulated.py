"""benchmarks/simulated.py, as far as it needs no engine; tests/integration/test_chain.py runs it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from draftsmith.errors import DraftsmithError
from draftsmith.store import row_id


@pytest.fixture
def simulated(repo: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    # A script finds its own folder first, and puts it last.
    monkeypatch.setattr(sys, "path", [str(repo / "benchmarks"), *sys.path])
    yield importlib.import_module("simulated")
    for name in ("arguments", "peer", "simulated"):
        sys.modules.pop(name, None)


def test_answers_become_rows(simulated: ModuleType) -> None:
    """By their ids, each once, and one for training that is a token shorter."""
    table = simulated.as_rows([([1, 2], [3, 4, 5]), ([1], [9, 9]), ([1, 2], [3, 4, 5])])
    assert [list(ids) for ids in table.input_ids] == [[1, 2, 3, 4, 5], [1, 9, 9], [1, 2, 3, 4]]
    assert table.row_id.tolist() == [row_id([1, 2, 3, 4, 5]), row_id([1, 9, 9]), row_id([1, 2, 3, 4])]
    assert table.split.tolist() == ["validation", "validation", "train"]
    assert (table.span_starts.tolist(), table.span_ends.tolist()) == ([[2], [1], [2]], [[5], [3], [4]])
    assert (table.length.tolist(), table.supervised.tolist()) == ([5, 3, 4], [3, 2, 2])


def test_the_validation_before_the_first_step_is_compared(simulated: ModuleType) -> None:
    history: list[dict[str, Any]] = [
        {"step": 1, "loss": 3.0},
        {"step": 1, "eval_acceptance_length": 9.0},
        {"step": 0, "eval_acceptance_length": 1.8, "eval_acceptance": [0.5, 0.4, 0.5]},
    ]
    served = {"k": 3, "acceptance_length": 2.0, "per_position": [0.6, 0.3, 0.1]}
    assert simulated.compared({"history": history}, served, 7) == {
        "k": 3, "answers": 7, "simulated": 1.8, "served": 2.0, "simulated_over_served": 0.9,
        "positions_served": [0.6, 0.3, 0.1], "positions_simulated": [0.5, 0.2, 0.1],
    }  # fmt: skip
    with pytest.raises(DraftsmithError, match="before the first step"):
        simulated.compared({"history": history[:2]}, served, 7)
