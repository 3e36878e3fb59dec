"""Each cause of an acceptance length near 1 is provoked and named; a sound draft has none of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from draftsmith.chat import Chat
from draftsmith.config import Config
from draftsmith.draft.config import draft_shape
from draftsmith.draft.initial import initial_draft
from draftsmith.draft.trained_as import KEY, trained_as
from draftsmith.evaluate_draft.causes import likely_causes
from draftsmith.evaluate_draft.counts import Counts
from draftsmith.evaluate_draft.faults import Served
from draftsmith.export_draft import draft_config, vocabulary_tensors

NEAR_ONE = Counts(drafts=100, draft_tokens=300, accepted=2, per_position=[2, 0, 0])
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "vocab_size": 320,
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 50000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                        "original_max_position_embeddings": 512},
}  # fmt: skip
# What the template writes before an answer, and three questions of different words.
HEADER = [1, 40, 41]
QUESTIONS = [[1, 50, 9, 8, 2, *HEADER], [1, 50, 7, 2, *HEADER], [1, 50, 6, 6, 6, 2, *HEADER]]


class Made:
    """A run's folder with a sound draft, whose files a test may spoil."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder / "results", folder / "model"
        tiny.tokenizer().save_pretrained(self.model)
        (self.model / "config.json").write_text(json.dumps(LLAMA))
        self.settings = Config()
        self.target = {
            "source": "model", "path": str(self.model), "hidden_size": 32, "vocab_size": 320, "num_layers": 8, "max_positions": 4096,
            "layers": [2, 4, 5], "fingerprint": "f", "architectures": LLAMA["architectures"], "trust_remote_code": False, "revision": None,
        }  # fmt: skip
        shape = draft_shape(self.target, self.settings.train, 40)
        ids = torch.arange(0, 320, 8)
        head = torch.randn(320, 32, generator=torch.Generator().manual_seed(0))
        in_draft = torch.zeros(320, dtype=torch.bool)
        in_draft[ids] = True
        mapping = vocabulary_tensors(ids, 320)
        weights = dict(initial_draft(shape, head[:0], head, mapping["d2t"], 0).state_dict())
        for name in ("train", "draft", "tokenize"):
            (self.folder / name).mkdir(parents=True)
        self.trained = {name: tensor.contiguous() for name, tensor in weights.items()}
        self.trained_as = trained_as(shape, mapping["d2t"], self.target)
        save_file(self.trained, self.folder / "train/draft.safetensors", {KEY: json.dumps(self.trained_as)})
        self.weights({name: tensor.bfloat16() for name, tensor in weights.items()} | mapping)
        self.write("draft/config.json", draft_config(self.settings, self.target, shape, "bfloat16"))
        self.write("train/train.json", {"layers": [2, 4, 5]})
        self.write("tokenize/tokenize.json", {"template_sha256": Chat.load(self.target, {}).template_sha256})
        self.rows(QUESTIONS)
        self.questions = [{"prompt_token_ids": [1, 50, 5, 2, *HEADER]}, {"prompt_token_ids": [1, 50, 4, 4, 2, *HEADER]}]

    def weights(self, tensors: dict[str, torch.Tensor]) -> None:
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()}, self.folder / "draft/model.safetensors"
        )

    def write(self, name: str, content: Any) -> None:
        (self.folder / name).write_text(json.dumps(content))

    def rows(self, contexts: list[list[int]]) -> None:
        pd.DataFrame({
            "split": "train", "input_ids": [[*context, 11, 12, 2] for context in contexts], "span_starts": [[len(context)] for context in contexts],
        }).to_parquet(self.folder / "tokenize/rows.parquet")  # fmt: skip

    def change(self, **values: Any) -> None:
        """Other values in the export's config.json; a None takes the key out, and A__B is B inside of A."""
        config = json.loads((self.folder / "draft/config.json").read_text())
        for path, value in values.items():
            place = config
            *outer, name = path.split("__")
            for part in outer:
                place = place[int(part) if part.isdigit() else part]
            place[name] = value
            if value is None:
                del place[name]
        self.write("draft/config.json", config)

    def spoil(self, name: str, change: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
        """Another tensor in the export, or none."""
        tensors = load_file(self.folder / "draft/model.safetensors")
        tensor = tensors.pop(name)
        self.weights(tensors if change is None else tensors | {name: change(tensor)})

    def causes(self, counts: Counts = NEAR_ONE, minimum: float = 1.0) -> list[str]:
        served = Served(self.settings, self.target, self.folder / "draft", self.questions, self.folder)
        return likely_causes(served, counts, minimum)


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path)


def test_a_sound_draft_has_none_of_the_faults(made: Made) -> None:
    assert made.causes() == []


LAYER = "transformer_layer_config__"
ROPE = f"{LAYER}rope_parameters__"
METHOD = "speculators_config__proposal_methods__0__"
FAULTS: dict[str, tuple[Callable[[Made], Any], str]] = {
    "layer ids": (
        lambda made: made.change(eagle_aux_hidden_state_layer_ids=[1, 3, 4]),
        r"layer ids: the export asks for \[1, 3, 4\], the draft has learnt from \[2, 4, 5\]",
    ),
    "a norm switched off": (
        lambda made: made.change(norm_before_residual=False),
        "norm: the export has norm_before_residual: false, the draft was trained with true",
    ),
    "a norm switched on": (lambda made: made.change(norm_output=True), "norm: the export has norm_output: true, .* with false"),
    "a norm left out": (
        lambda made: made.change(norm_before_residual=None),
        "norm: the export does not say norm_before_residual, which was true in training",
    ),
    "a norm before fc": (lambda made: made.change(norm_before_fc=True), "norm: the export has norm_before_fc: true"),
    "no head": (lambda made: made.spoil("lm_head.weight", None), r"missing head: the export has no lm_head\.weight"),
    "another head": (
        lambda made: made.spoil("lm_head.weight", lambda head: head.flip(0)),
        r"missing head: lm_head\.weight of the export is not the one that was trained",
    ),
    "another weight": (
        lambda made: made.spoil("fc.weight", lambda weight: weight * 2), r"weights: fc\.weight of the export is not the one"
    ),
    "no map": (lambda made: made.spoil("d2t", None), "missing map: the export has no d2t"),
    "another map": (
        lambda made: made.spoil("d2t", lambda d2t: d2t + 1), "another map: d2t of the export names other tokens than the draft was trained with"
    ),
    "another method": (
        lambda made: made.change(speculators_model_type="eagle"), 'flag: speculators_model_type of the export is "eagle" and must be "eagle3"'
    ),
    "tied embeddings": (lambda made: made.change(tie_word_embeddings=True), "flag: tie_word_embeddings of the export is true"),
    "nothing to draft": (
        lambda made: made.change(**{f"{METHOD}speculative_tokens": 0}), r"flag: .*\.0\.speculative_tokens of the export is 0"
    ),
    "a window": (
        lambda made: made.change(**{f"{LAYER}layer_types": ["sliding_attention"], f"{LAYER}sliding_window": 64}),
        "flag: the attention window of the export is 64 and must be null",
    ),
    "too few positions": (
        lambda made: made.change(**{f"{LAYER}max_position_embeddings": 2048}), "positions: the draft ends at 2048, the target at 4096"
    ),
    "another base": (
        lambda made: made.change(**{f"{ROPE}rope_theta": 10000.0}),
        r"positions: rope_theta of the export is 10000\.0, in training it was 50000\.0",
    ),
    "another scaling": (lambda made: made.change(**{f"{ROPE}factor": None}), "positions: factor of the export is null, in training it was 8.0"),
    "prompts of another template": (
        lambda made: made.questions.__setitem__(slice(None), [{"prompt_token_ids": [1, 50, 5, 77, 78]}] * 2),
        r"template: answers of the training rows come after the tokens \[2, 1, 40, 41\], the prompts end with \[50, 5, 77, 78\]",
    ),
    "another system prompt": (
        lambda made: made.questions.__setitem__(slice(None), [{"prompt_token_ids": [1, 60, 5, 2, *HEADER]}] * 2),
        r"template: training rows begin with the tokens \[1, 50\], the prompts with \[1, 60\]",
    ),
    "a template that was changed": (
        lambda made: made.write("tokenize/tokenize.json", {"template_sha256": "of another"}),
        "template: the target's chat template is no longer the one that the rows were written by",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_and_no_other(made: Made, fault: str) -> None:
    spoil, named = FAULTS[fault]
    spoil(made)
    causes = made.causes()
    assert len(causes) == 1, causes
    assert re.match(named, causes[0]), causes[0]


def test_an_empty_head_is_named(made: Made) -> None:
    made.spoil("lm_head.weight", torch.zeros_like)
    assert "missing head: lm_head.weight of the export is all zero" in made.causes()


def test_a_config_that_is_not_the_trainings_hides_no_fault(made: Made) -> None:
    """The export follows the config of now, and both say otherwise than the draft was trained."""
    made.settings = Config.model_validate({"train": {"norm_before_residual": False, "attention_window": 64}})
    assert made.causes() == []
    made.change(
        norm_before_residual=False, **{f"{LAYER}layer_types": ["sliding_attention"], f"{LAYER}sliding_window": 64}
    )
    assert made.causes() == [
        "norm: the export has norm_before_residual: false, the draft was trained with true",
        "flag: the attention window of the export is 64 and must be null",
    ]


def test_what_a_draft_of_an_earlier_version_does_not_tell_is_asked_of_config_target_and_vocabulary(made: Made) -> None:
    save_file(made.trained, made.folder / "train/draft.safetensors")
    assert made.causes() == []
    made.settings = Config.model_validate({"train": {"fc_norm": True}})
    made.change(**{f"{ROPE}rope_theta": 10000.0})
    (made.folder / "vocabulary").mkdir()
    save_file({"d2t": torch.arange(40)}, made.folder / "vocabulary/vocabulary.safetensors")
    assert made.causes() == [
        "norm: the export has fc_norm: false, the draft was trained with true",
        "norm: the export has no weight of fc_norm, which was true in training",
        "another map: d2t of the export names other tokens than the draft was trained with; run export_draft again with the "
        "vocabulary.safetensors of the training",
        "positions: rope_theta of the export is 10000.0, by the target's config it is 50000.0",
    ]


def test_norms_of_the_captured_layers_that_were_trained_and_not_exported(made: Made) -> None:
    metadata = {KEY: json.dumps(made.trained_as | {"fc_norm": True})}
    save_file(made.trained, made.folder / "train/draft.safetensors", metadata)
    assert made.causes() == [
        "norm: the export has fc_norm: false, the draft was trained with true",
        "norm: the export has no weight of fc_norm, which was true in training",
    ]


def test_without_files_of_the_training_the_states_name_the_layers(made: Made) -> None:
    for name in ("train/train.json", "train/draft.safetensors", "tokenize/rows.parquet", "tokenize/tokenize.json"):
        (made.folder / name).unlink()
    assert made.causes() == []
    (made.folder / "extract").mkdir()
    made.write("extract/manifest.json", {"layers": [0, 1, 2]})
    assert made.causes() == ["layer ids: the export asks for [2, 4, 5], the draft has learnt from [0, 1, 2]"]


def test_a_sound_export_that_was_trained_well_is_served_wrongly(made: Made) -> None:
    made.write("train/train.json", {"layers": [2, 4, 5], "simulated_acceptance_length": 1.9})
    (cause,) = made.causes()
    assert "served otherwise than trained" in cause


def test_a_sound_export_that_learnt_nothing(made: Made) -> None:
    made.write("train/train.json", {"layers": [2, 4, 5], "simulated_acceptance_length": 1.01})
    (cause,) = made.causes()
    assert "has learnt little: 1.01" in cause


def test_no_drafts_at_all(made: Made) -> None:
    assert "drafted nothing" in made.causes(Counts())[0]


def test_a_good_draft_has_no_causes(tmp_path: Path) -> None:
    good = Counts(drafts=100, draft_tokens=300, accepted=90, per_position=[60, 20, 10])
    nothing_is_read = Served(Config(), {}, tmp_path / "nowhere", [], tmp_path)
    assert likely_causes(nothing_is_read, good) == []


def test_below_the_gate_faults_are_named_whatever_the_length(made: Made) -> None:
    fair = Counts(drafts=100, draft_tokens=300, accepted=30, per_position=[30, 0, 0])
    made.change(norm_output=True)
    assert made.causes(fair, minimum=1.2) == []
    assert len(made.causes(fair, minimum=1.4)) == 1
