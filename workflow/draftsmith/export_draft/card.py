"""README.md of the export."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from draftsmith.config import Config
from draftsmith.export_draft.settings import verifier

if TYPE_CHECKING:
    from draftsmith.draft.config import DraftShape


def model_card(
    config: Config,
    target: Mapping[str, Any],
    shape: DraftShape,
    trained: Mapping[str, Any],
    exported: Mapping[str, Any],
) -> str:
    """README.md of the export: what it is, how to serve it, how it was made, how good it is in simulation."""
    name = verifier(target)
    hub = {} if name.startswith("/") else {"base_model": name}
    head = "\n".join(
        ["---", *(f"{key}: {value}" for key, value in hub.items()), "tags: [speculative-decoding, eagle3]", "---"]
    )
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    rows = [
        ("target", f"`{target['source']}`" + (f" at `{target['revision']}`" if target.get("revision") else "")),
        ("target's fingerprint", f"`{target['fingerprint']}`"),
        ("training's fingerprint", f"`{trained['fingerprint']}`"),
        ("captured layers (input of)", ", ".join(map(str, shape.layers)) + f" of {target['num_layers']}"),
        ("draft vocabulary", f"{shape.draft_vocab:,} of {shape.target_vocab:,} tokens"),
        *([("attention", "latent (MLA), as the target's")] if shape.latent else []),
        ("trained weights", f"{trained['params']:,} ({exported['dtype']} here)"),
        ("flags", ", ".join(f"{flag}: {str(exported[flag]).lower()}" for flag in flags)),
        *([("attention window", f"{shape.attention_window:,} positions")] if shape.attention_window else []),
        ("training", f"{trained['steps']:,} steps, {trained['epochs']:g} epochs, {trained['tokens']:,} tokens in rows"),
        ("TTT steps, decay", f"{config.train.ttt_steps}, {config.train.step_decay:g}"),
        ("learning rate, seed", f"{config.train.learning_rate:g}, {config.train.seed}"),
    ]
    if trained["simulated_acceptance_length"] is not None:
        shares = " / ".join(f"{share:.1%}" for share in trained.get("acceptance") or [])
        rows += [
            (
                "simulated acceptance length",
                f"{trained['simulated_acceptance_length']:.3f} on validation rows, {config.train.ttt_steps} tokens drafted",
            ),
            ("simulated acceptance by position", shares),
        ]
    table = "\n".join(["| | |", "| --- | --- |", *(f"| {label} | {value} |" for label, value in rows)])
    count = config.export.speculative_tokens
    beside = json.dumps({"method": "eagle3", "model": "THIS FOLDER", "num_speculative_tokens": count})
    alone = f"    vllm serve THIS_FOLDER                                   # {count} tokens drafted; loads {name}\n"
    if shape.latent is not None:
        # vLLM reads the target's name from a draft with a Llama layer alone.
        alone = ""
    place = f"\n{_elsewhere(name, shape)}\n" if name.startswith("/") else ""
    return f"""{head}
# EAGLE-3 draft for {target["source"]}

A one-layer draft model for speculative decoding. It proposes tokens, the target checks them; greedy output stays that of the
target. It is of no use without the target, whose embedding and hidden states it takes.

{alone}    vllm serve {name} --speculative-config '{beside}'
{place}
{table}

The simulated figures are greedy acceptance along stored answers, a target token outside the draft vocabulary counting as
rejected; a server's own figures are what counts. Made with Draftsmith.
"""


def _elsewhere(name: str, shape: DraftShape) -> str:
    """What to change where the target lies in another folder than ``name``."""
    if shape.latent is not None:
        return f"Where the target is not in `{name}`, put its folder or hub id there into the command."
    return (
        f"Where the target is not in `{name}`, put its folder or hub id there into `speculators_config.verifier.name_or_path` of "
        "config.json, which the first command reads, and into the second command."
    )
