"""Known faults of a served draft, each looked for in the files and named only where it is found.

Each check compares what the server reads with what training has used, so that a sound draft has none of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from draftsmith.config import Config
from draftsmith.draft.config import layer_of, window_of
from draftsmith.draft.trained_as import told_by, vocabulary_digest
from draftsmith.errors import DraftsmithError


@dataclass(frozen=True)
class Served:
    """The exported draft as it was served, and what it comes from.

    ``target`` is the content of target.json, ``draft`` the folder that was served, ``questions`` are the prompts as
    tokenize/prompts.jsonl has them, ``results`` is the folder results/NAME, of which any file may be missing.
    """

    config: Config
    target: Mapping[str, Any]
    draft: Path
    questions: list[dict[str, Any]]
    results: Path

    @cached_property
    def exported(self) -> dict[str, Any]:
        """config.json of the draft."""
        return dict(json.loads((self.draft / "config.json").read_text()))

    @cached_property
    def layer(self) -> dict[str, Any]:
        """The part of config.json that describes the draft's layer."""
        return dict(layer_of(self.exported))

    @cached_property
    def trained(self) -> dict[str, Any]:
        """train/train.json, or nothing."""
        return self.found("train/train.json")

    @cached_property
    def trained_as(self) -> dict[str, Any]:
        """What train/draft.safetensors tells of itself (:mod:`draftsmith.draft.trained_as`); nothing where it is gone, or of an earlier version."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.results / "train/draft.safetensors", framework="pt") as opened:
                return told_by(opened.metadata())
        except (OSError, SafetensorError):
            return {}

    def setting(self, name: str) -> Any:
        """A key of ``train`` as it was in training."""
        return self.trained_as.get(name, getattr(self.config.train, name))

    @property
    def weights(self) -> Path:
        """The exported weights."""
        return self.draft / "model.safetensors"

    def found(self, name: str) -> dict[str, Any]:
        """A JSON file of the run; empty where it cannot be read."""
        try:
            return dict(json.loads((self.results / name).read_text()))
        except (OSError, ValueError, TypeError):
            return {}


def layer_ids(served: Served) -> Iterator[str]:
    """The server captures other layers than those whose states the draft has learnt from."""
    exported = served.exported
    asked = exported.get("eagle_aux_hidden_state_layer_ids")
    asked = asked or (exported.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    learnt = served.trained.get("layers") or served.found("extract/manifest.json").get("layers")
    if learnt is not None and asked != learnt:
        yield f"layer ids: the export asks for {asked}, the draft has learnt from {learnt}"


def norm(served: Served) -> Iterator[str]:
    """A switch of the norms is another than in training, or is left to the server's default."""
    from safetensors import safe_open

    wanted = {
        "norm_before_residual": served.setting("norm_before_residual"),
        "norm_before_fc": False,
        "fc_norm": served.setting("fc_norm"),
        "norm_output": served.setting("norm_output"),
    }
    for name, trained in wanted.items():
        has = served.exported.get(name)
        if has is None and name in ("norm_before_residual", "norm_output", "fc_norm"):
            yield f"norm: the export does not say {name}, which was {_yaml(trained)} in training; servers differ in what they take then"
        elif bool(has) != trained:
            yield f"norm: the export has {name}: {_yaml(has)}, the draft was trained with {_yaml(trained)}"
    with safe_open(served.weights, framework="pt") as opened:
        normed = any(name.startswith("fc_norm.") for name in opened.keys())  # noqa: SIM118
    if normed != wanted["fc_norm"]:
        yield f"norm: the export has {'a' if normed else 'no'} weight of fc_norm, which was {_yaml(wanted['fc_norm'])} in training"


def head(served: Served) -> Iterator[str]:
    """The draft's own output head is missing, empty, or not the one that was trained."""
    from safetensors import safe_open

    with safe_open(served.weights, framework="pt") as opened:
        if "lm_head.weight" not in opened.keys():  # noqa: SIM118
            yield "missing head: the export has no lm_head.weight, so the target's head is used on the draft's states"
            return
        weight = opened.get_tensor("lm_head.weight")
    if not bool(weight.any()):
        yield "missing head: lm_head.weight of the export is all zero"


def weights(served: Served) -> Iterator[str]:
    """Tensors of the export are not those of the training, rounded; or there is no map of the vocabulary."""
    import torch
    from safetensors import safe_open

    trained = served.results / "train" / "draft.safetensors"
    with safe_open(served.weights, framework="pt") as opened:
        names = set(opened.keys())
        if served.exported.get("draft_vocab_size") != served.target["vocab_size"] and "d2t" not in names:
            yield "missing map: the export has no d2t, so draft token ids are taken for the target's"
        learnt_on = _vocabulary(served)
        if "d2t" in names and learnt_on and vocabulary_digest(opened.get_tensor("d2t").long()) != learnt_on:
            yield "another map: d2t of the export names other tokens than the draft was trained with; run export_draft again with the vocabulary.safetensors of the training"
        if not trained.exists():
            return
        with safe_open(trained, framework="pt") as learnt:
            for name in sorted(names & set(learnt.keys())):
                has = opened.get_tensor(name)
                if not torch.equal(has, learnt.get_tensor(name).to(has.dtype)):
                    label = "missing head" if name == "lm_head.weight" else "weights"
                    yield f"{label}: {name} of the export is not the one that was trained; run export_draft again"


def flag(served: Served) -> Iterator[str]:
    """A key of config.json tells the server to run the draft as what it is not."""
    exported = served.exported
    speculators = exported.get("speculators_config") or {}
    inner = exported.get("eagle_config") or {}
    wanted: list[tuple[str, Any, Any]] = [
        ("speculators_model_type", exported.get("speculators_model_type", "eagle3"), "eagle3"),
        ("speculators_config.algorithm", speculators.get("algorithm", "eagle3"), "eagle3"),
        ("tie_word_embeddings", exported.get("tie_word_embeddings", False), False),
        ("eagle_config.use_aux_hidden_state", inner.get("use_aux_hidden_state", True), True),
        ("the attention window", window_of(served.layer), served.setting("attention_window")),
    ]
    for name, has, right in wanted:
        if has != right:
            yield f"flag: {name} of the export is {_yaml(has)} and must be {_yaml(right)}"
    for place, method in enumerate(speculators.get("proposal_methods") or []):
        if not method.get("speculative_tokens"):
            yield f"flag: speculators_config.proposal_methods.{place}.speculative_tokens of the export is {_yaml(method.get('speculative_tokens'))}, so a server drafts nothing"


def positions(served: Served) -> Iterator[str]:
    """The draft turns its queries and keys by other angles than in training, or ends before the target does."""
    from draftsmith.draft.config import draft_shape

    has, wanted = served.layer.get("max_position_embeddings"), served.target.get("max_positions")
    if wanted and has and has < wanted:
        yield f"positions: the draft ends at {has}, the target at {wanted}; beyond that nothing is accepted"
    vocabulary = served.exported.get("draft_vocab_size") or served.target["vocab_size"]
    rope, by = served.trained_as.get("rope"), "in training it was"
    if rope is None:
        by = "by the target's config it is"
        try:
            rope = draft_shape(dict(served.target) | {"layers": []}, served.config.train, vocabulary).rope
        except (DraftsmithError, OSError, KeyError):
            # The checkpoint is gone or was replaced; nothing can be compared.
            return
    turned, right = _rope(served.layer), _rope({"rope_parameters": rope})
    for name in sorted(turned.keys() | right.keys()):
        if turned.get(name) != right.get(name):
            yield f"positions: {name} of the export is {_yaml(turned.get(name))}, {by} {_yaml(right.get(name))}"


CHECKS = (layer_ids, norm, head, weights, flag, positions)
"""Faults of the exported folder, those that are met most often first."""


def _vocabulary(served: Served) -> str | None:
    """Digest of the d2t that the draft was trained with; that of the run's vocabulary where an earlier version trained."""
    from draftsmith.draft.initial import read_vocabulary

    if told := served.trained_as.get("vocabulary"):
        return str(told)
    try:
        return vocabulary_digest(read_vocabulary(served.results / "vocabulary/vocabulary.safetensors"))
    except DraftsmithError:
        return None


def _rope(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Rope parameters of a config of transformers 5 or older, in the newer form; what is None says nothing."""
    rope = dict(layer.get("rope_parameters") or layer.get("rope_scaling") or {})
    rope = {"rope_type": rope.pop("type", "default"), "rope_theta": layer.get("rope_theta", 10000.0)} | rope
    return {name: value for name, value in rope.items() if value is not None}


def _yaml(value: Any) -> str:
    return json.dumps(value)
