"""The draft to come is looked at before the target is loaded: a source that does not fit, layouts that cannot hold it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from looked_at import Make
from safetensors.torch import load_file, save_file

from draftsmith.draft.config import draft_shape
from draftsmith.errors import DraftsmithError
from draftsmith.export_draft import draft_config, expected_tensors
from draftsmith.preflight.checks import before_regeneration
from draftsmith.preflight.draft import draft
from draftsmith.preflight.subject import Subject
from draftsmith.verdict import Skip

SIZE = 20


@pytest.fixture
def source(make: Make, tmp_path: Path) -> Path:
    """A draft of the target, of the layers 1, 3 and 5, whose vocabulary are the target's first twenty tokens."""
    folder, subject = tmp_path / "source of mine", make()
    shape = draft_shape(subject.target | {"layers": [1, 3, 5]}, subject.config.train, SIZE)
    tensors = {name: torch.ones(size) for name, size in expected_tensors(shape).items()}
    tensors["d2t"], tensors["t2d"] = torch.zeros(SIZE, dtype=torch.int64), torch.arange(shape.target_vocab) < SIZE
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    target = {"source": "a/b", "revision": "1", "architectures": ["LlamaForCausalLM"]} | subject.target
    (folder / "config.json").write_text(json.dumps(draft_config(subject.config, target, shape, "float32")))
    return folder


def begun(make: Make, source: Path, **sections: Any) -> Subject:
    given = {"train": {"initial_draft": str(source)} | sections.pop("train", {})}
    return make(settings=given | sections)


def test_a_new_draft_and_one_that_fits(make: Make, source: Path) -> None:
    status, said = draft(make(settings={"vocabulary": {"size": 24}}))
    assert (status, said.split(":")[0], said.split(", ")[-1]) == ("ok", "a new draft", "24 tokens")
    status, said = draft(begun(make, source))
    assert (status, said.split(":")[0]) == ("ok", f"training goes on from {source}")
    # Its own vocabulary, whatever vocabulary.size says.
    assert said.endswith(", 20 tokens")


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"target": {"layers": [1, 2, 5]}}, r"set target\.layers: \[1, 3, 5\]"),
        ({"train": {"norm_before_residual": False}}, r"set train\.norm_before_residual: true"),
        ({"train": {"intermediate_size": 8}}, r"set train\.intermediate_size"),
        ({"export": {"layouts": ["sglang"]}}, r"train with train\.norm_before_residual: false"),
    ],
)
def test_what_would_fail_in_training_or_export_fails_before_anything_is_loaded(
    sections: dict[str, Any], named: str, make: Make, source: Path
) -> None:
    subject = begun(make, source, **sections)
    with pytest.raises(DraftsmithError, match=named):
        draft(subject)
    with pytest.raises(DraftsmithError, match=named):
        before_regeneration(subject.config, subject.target)


def test_a_source_that_was_spoilt_is_named(make: Make, source: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {"norm.weight": tensors["norm.weight"] * float("nan")}, source / "model.safetensors")
    with pytest.raises(DraftsmithError, match=r"norm\.weight of .* not finite"):
        draft(begun(make, source))


def test_layers_that_are_wrong_are_told_once(make: Make) -> None:
    with pytest.raises(Skip, match="'layers' did not pass"):
        draft(make(settings={"target": {"layers": [1, 3, 99]}}))
