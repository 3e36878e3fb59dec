"""Each cause of an acceptance length near 1 is provoked and named; a healthy draft is left alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from draftsmith.evaluate_draft.causes import likely_causes
from draftsmith.evaluate_draft.counts import Counts

TARGET = {"vocab_size": 100, "max_positions": 8192}
NEAR_ONE = Counts(drafts=100, draft_tokens=300, accepted=2, per_position=[2, 0, 0])


def export(folder: Path, drop: str = "", **changes: Any) -> Path:
    config = {
        "eagle_aux_hidden_state_layer_ids": [2, 15, 27],
        "draft_vocab_size": 40,
        "transformer_layer_config": {"max_position_embeddings": 8192},
    } | changes
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {"lm_head.weight": torch.zeros(40, 4), "d2t": torch.zeros(40, dtype=torch.int64)}
    save_file({name: tensor for name, tensor in tensors.items() if name != drop}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 14, 26]},
            r"layer ids: the export asks for \[1, 14, 26\], the draft has learnt from \[2, 15, 27\]",
        ),
        ({"drop": "lm_head.weight"}, "missing head"),
        ({"drop": "d2t"}, "missing map"),
        (
            {"transformer_layer_config": {"max_position_embeddings": 2048}},
            "positions: the draft ends at 2048, the target at 8192",
        ),
    ],
)
def test_a_fault_of_the_export_is_named(tmp_path: Path, broken: dict[str, Any], named: str) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train/train.json").write_text(json.dumps({"layers": [2, 15, 27]}))
    causes = likely_causes(export(tmp_path / "draft", **broken), TARGET, NEAR_ONE, tmp_path)
    assert len(causes) == 1
    assert re.search(named, causes[0])


def test_a_sound_export_that_was_trained_well_is_served_wrongly(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train/train.json").write_text(json.dumps({"simulated_acceptance_length": 1.9}))
    assert "served otherwise than trained" in likely_causes(export(tmp_path / "draft"), TARGET, NEAR_ONE, tmp_path)[0]


def test_a_sound_export_that_learnt_nothing(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train/train.json").write_text(json.dumps({"simulated_acceptance_length": 1.01}))
    assert "has learnt little: 1.01" in likely_causes(export(tmp_path / "draft"), TARGET, NEAR_ONE, tmp_path)[0]


def test_no_drafts_at_all(tmp_path: Path) -> None:
    assert "drafted nothing" in likely_causes(export(tmp_path / "draft"), TARGET, Counts(), tmp_path)[0]


def test_a_good_draft_has_no_causes(tmp_path: Path) -> None:
    good = Counts(drafts=100, draft_tokens=300, accepted=90, per_position=[60, 20, 10])
    assert likely_causes(tmp_path / "nothing-is-read", TARGET, good, tmp_path) == []
