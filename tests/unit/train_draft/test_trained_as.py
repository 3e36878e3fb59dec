"""What a trained draft tells of itself, from the training to the export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import training_run
from draftsmith import export_draft
from draftsmith.draft.trained_as import KEY
from draftsmith.errors import DraftsmithError
from training_run import RunFolder


@pytest.fixture
def trained(tmp_path: Path) -> RunFolder:
    made = training_run.make(tmp_path)
    made.train(max_steps=1, attention_window=16)
    return made


def export(trained: RunFolder, window: int | None = 16, norm_output: bool = False) -> None:
    out = trained.folder / "out"
    export_draft.run(
        trained.config(attention_window=window, norm_output=norm_output), target=trained.folder / "target.json",
        draft=out / "draft.safetensors", vocabulary=trained.folder / "vocabulary.safetensors", train_report=out / "train.json",
        folder=trained.folder / "draft", report=trained.folder / "draft/export.json",
    )  # fmt: skip


def test_the_file_of_the_weights_tells_what_they_do_not(trained: RunFolder) -> None:
    with safe_open(trained.folder / "out/draft.safetensors", framework="pt") as file:
        told = json.loads(file.metadata()[KEY])
    assert {name: told[name] for name in ("architecture", "attention_window", "norm_before_residual", "layers")} == {
        "architecture": "llama",
        "attention_window": 16,
        "norm_before_residual": True,
        "layers": training_run.LAYERS,
    }
    assert told["rope"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert (told["heads"], told["kv_heads"], told["head_dim"], told["latent"]) == (4, 2, 8, None)


def test_it_is_exported_as_that_and_refused_as_anything_else(trained: RunFolder) -> None:
    export(trained)
    with pytest.raises(DraftsmithError, match=r"train\.attention_window: 16, and the config gives null"):
        export(trained, window=None)
    with pytest.raises(DraftsmithError, match=r"train\.norm_output: false, and the config gives true"):
        export(trained, norm_output=True)
    vocabulary = trained.folder / "vocabulary.safetensors"
    # As many tokens, each the one after.
    save_file({"d2t": load_file(vocabulary)["d2t"] + torch.tensor(1)}, vocabulary)
    with pytest.raises(DraftsmithError, match=r"was trained on other tokens \(d2t\)"):
        export(trained)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("target.json", "[]", r"target\.json: holds no JSON object"),
        ("manifest.json", "{}", r"manifest\.json: lacks store, fingerprint, layers, hidden_size, rows; delete it"),
    ],
)
def test_damaged_inputs_of_a_training_are_named(name: str, text: str, told: str, tmp_path: Path) -> None:
    made = training_run.make(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(DraftsmithError, match=told):
        made.train(max_steps=1)


def test_a_work_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    made = training_run.make(tmp_path)
    (tmp_path / "work").touch()
    with pytest.raises(
        DraftsmithError, match=r"/work/\w{16}: cannot be written \(Not a directory\).* run train_draft again"
    ):
        made.train(max_steps=1)
