"""Why an acceptance length may be near 1: each known cause is looked for, and named only where it is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftsmith.evaluate_draft.counts import Counts

# Below this the draft is as good as absent.
NEAR_ONE = 1.05


def likely_causes(draft: Path, target: dict[str, Any], counts: Counts, results: Path) -> list[str]:
    """Sentences about what is wrong with the export in ``draft``; empty when the acceptance length is not near 1."""
    if counts.acceptance_length > NEAR_ONE:
        return []
    if counts.drafts == 0:
        return ["vLLM drafted nothing at all: the speculative_config was not applied"]
    try:
        trained = json.loads((results / "train" / "train.json").read_text())
    except (OSError, ValueError):
        trained = {}
    return [*_export(draft, target, trained), *_training(trained)]


def _export(draft: Path, target: dict[str, Any], trained: dict[str, Any]) -> list[str]:
    from safetensors import safe_open

    config = json.loads((draft / "config.json").read_text())
    with safe_open(draft / "model.safetensors", framework="pt") as opened:
        names = set(opened.keys())
    layer = config.get("transformer_layer_config", {})
    causes = []
    asked, learnt = config.get("eagle_aux_hidden_state_layer_ids"), trained.get("layers")
    if learnt is not None and asked != learnt:
        causes.append(f"layer ids: the export asks for {asked}, the draft has learnt from {learnt}")
    if "lm_head.weight" not in names:
        causes.append(
            "missing head: the export has no lm_head.weight, so the target's head is used on the draft's states"
        )
    if config.get("draft_vocab_size") != target["vocab_size"] and "d2t" not in names:
        causes.append("missing map: the export has no d2t, so draft token ids are taken for the target's")
    positions, wanted = layer.get("max_position_embeddings"), target.get("max_positions")
    if wanted and positions and positions < wanted:
        causes.append(
            f"positions: the draft ends at {positions}, the target at {wanted}; beyond that nothing is accepted"
        )
    return causes


def _training(trained: dict[str, Any]) -> list[str]:
    simulated = trained.get("simulated_acceptance_length")
    if simulated is None:
        return []
    if simulated > NEAR_ONE + 0.15:
        return [
            f"served otherwise than trained: on validation rows the draft reached a simulated {simulated:.2f}; compare the chat template, "
            "the norm flags and the layer ids of training and serving"
        ]
    return [
        f"the draft has learnt little: {simulated:.2f} is also its simulated acceptance length; train on more answers of the target, or longer"
    ]
