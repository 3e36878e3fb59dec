"""What a draft was trained as and its weights do not tell: it stands in the head of their file, and is compared before they are exported.

A draft that is run with another switch, window, rope or vocabulary loads without an error and proposes what is not accepted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.draft.config import DraftShape
from draftsmith.errors import DraftsmithError
from draftsmith.target_fingerprint import states_fingerprint

if TYPE_CHECKING:
    from torch import Tensor

KEY = "trained_as"
"""Its place in the metadata of draft.safetensors; drafts of versions before it have none."""
_SETTINGS = ("architecture", "norm_before_residual", "fc_norm", "norm_output", "attention_window", "intermediate_size")
_OF_THE_TARGET = ("heads", "kv_heads", "head_dim", "latent", "rope", "rms_norm_eps", "target")


def trained_as(shape: DraftShape, d2t: Tensor, target: Mapping[str, Any]) -> dict[str, Any]:
    """What JSON can hold of ``shape``, the draft vocabulary ``d2t`` int64 [Vd] and the target of ``target.json``, as far as a server depends on it."""
    told = asdict(shape) | {
        "architecture": "llama" if shape.latent is None else "mla",
        "layers": list(shape.layers),
        "target": states_fingerprint(target),
        "vocabulary": vocabulary_digest(d2t),
    }
    return {name: told[name] for name in (*_SETTINGS, *_OF_THE_TARGET, "layers", "vocabulary")}


def vocabulary_digest(d2t: Tensor) -> str:
    """16 hex digits over ``d2t`` int64 [Vd]."""
    return hashlib.sha256(d2t.numpy().astype("<i8").tobytes()).hexdigest()[:16]


def told_by(metadata: Mapping[str, str] | None) -> dict[str, Any]:
    """What the metadata of a draft.safetensors tells; nothing, where an earlier version wrote it."""
    try:
        return dict(json.loads((metadata or {}).get(KEY, "{}")))
    except (ValueError, TypeError):
        return {}


def check_trained_as(trained: Mapping[str, Any], now: Mapping[str, Any], paths: Mapping[str, Path]) -> None:
    """Fail where the draft is ``now`` described as another than was ``trained``, naming the first key that differs.

    ``paths`` are those of ``draft``, ``target``, ``vocabulary`` and ``train_report``, for the message. A key that one of the
    two lacks says nothing. Raises :class:`DraftsmithError`.
    """
    # What a tuple became in the file it becomes here.
    now = json.loads(json.dumps(now))
    for name, was in trained.items():
        if name not in now or now[name] == was:
            continue
        draft, has, had = paths["draft"], json.dumps(now[name]), json.dumps(was)
        if name in _SETTINGS:
            told = f"with train.{name}: {had}, and the config gives {has}; set train.{name}: {had}"
        elif name == "layers":
            told = f"on the layers {had}, and {paths['train_report']} says {has}; give the train.json of that training"
        elif name == "vocabulary":
            told = f"on other tokens (d2t) than {paths['vocabulary']} names; give the vocabulary.safetensors of that training"
        elif name == "target":
            told = f"for the target {had}, and {paths['target']} describes {has}; give the target.json of that training"
        else:
            told = f"with {name} {had}, and the checkpoint of {paths['target']} gives {has}; put its config.json of then back"
        raise DraftsmithError(f"{draft} was trained {told}, or run train_draft again")
