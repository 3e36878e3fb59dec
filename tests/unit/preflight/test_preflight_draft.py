"""The draft to come is looked at before the target is loaded: a source that does not fit, layouts that cannot hold it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from looked_at import Make
from safetensors.torch import load_file, save_file

from draftsmith import vllm_compat
from draftsmith.draft.config import DraftShape, draft_shape
from draftsmith.draft.latent import Latent
from draftsmith.errors import DraftsmithError
from draftsmith.export_draft import draft_config, expected_tensors
from draftsmith.preflight.checks import before_regeneration
from draftsmith.preflight.draft import check_latent, draft
from draftsmith.preflight.subject import Subject
from draftsmith.verdict import Skip

SIZE = 20
LATENT = DraftShape(
    hidden_size=64, heads=4, kv_heads=4, head_dim=12, intermediate_size=64, rms_norm_eps=1e-6, max_positions=256, target_vocab=40,
    draft_vocab=12, layers=(1, 2, 3), norm_before_residual=True, fc_norm=False, norm_output=False,
    rope={"rope_type": "default", "rope_theta": 1e4},
    latent=Latent(q_lora_rank=6, kv_lora_rank=10, qk_nope_head_dim=4, qk_rope_head_dim=8, v_head_dim=8),
)  # fmt: skip


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


def test_latent_attention_is_looked_at_before_the_target_writes_its_answers(make: Make) -> None:
    """This target has none."""
    subject = make(settings={"train": {"architecture": "mla"}, "vocabulary": {"size": 24}})
    for look in (lambda: draft(subject), lambda: before_regeneration(subject.config, subject.target)):
        with pytest.raises(DraftsmithError, match=r"has no kv_lora_rank; set train\.architecture: llama"):
            look()


@pytest.mark.parametrize(
    ("rope", "old", "refused"), [("default", True, True), ("default", False, False), ("yarn", True, False)]
)
def test_a_release_that_knows_yarn_alone(
    rope: str, old: bool, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.26 overwrites the rope's type."""
    yarn = {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    shape = replace(LATENT, rope=yarn) if rope == "yarn" else LATENT
    models = tmp_path / "model_executor" / "models"
    models.mkdir(parents=True)
    line = 'rope_params["rope_type"] = "deepseek_yarn"' if old else "pass"
    (models / "deepseek_eagle3.py").write_text(f"if True:\n    {line}\n")
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(vllm_compat, "find_spec", lambda name: found)
    monkeypatch.setattr(vllm_compat, "version", lambda: "0.26.0")
    if not refused:
        check_latent(shape)
        return
    with pytest.raises(DraftsmithError, match=r"vLLM 0\.26\.0 serves such a draft with yarn alone"):
        check_latent(shape)


def test_sizes_that_a_server_could_not_read() -> None:
    """Heads that do not divide the width, which draft_shape does not choose."""
    shape = replace(LATENT, heads=5, kv_heads=5)
    with pytest.raises(
        DraftsmithError, match=r"transformers refuses the draft's sizes .*multiple.*set train\.architecture: llama"
    ):
        check_latent(shape)


def test_a_llama_layer_that_transformers_refuses_is_told_before_the_target_is_loaded(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GLM-4.5's 96 heads beside a width of 5120, which draft_shape does not choose."""
    shape = replace(LATENT, latent=None, hidden_size=5120, heads=96, kv_heads=8, head_dim=128)
    monkeypatch.setattr("draftsmith.draft.config.draft_shape", lambda *_: shape)
    with pytest.raises(
        DraftsmithError, match=r"96 heads of 128 on 8 key heads beside a width of 5120, which transformers refuses"
    ):
        draft(make(settings={"vocabulary": {"size": 12}}))
