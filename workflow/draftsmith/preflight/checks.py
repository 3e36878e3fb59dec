"""The list of the checks, and those that come even before the rows are there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftsmith import hardware
from draftsmith.config import Config
from draftsmith.files import check_writable
from draftsmith.preflight import draft, machine, model, served, text
from draftsmith.preflight.subject import Subject
from draftsmith.target_sizes import check_sizes
from draftsmith.verdict import Check, Found, made

CHECKS: dict[str, Callable[[Subject], Found]] = {
    "versions": model.versions,
    "architecture": model.architecture,
    "reading": model.reading,
    "layers": model.layers,
    "draft": draft.draft,
    "engine arguments": model.arguments,
    "precision": model.precision,
    "row lengths": text.lengths,
    "vocabulary": text.vocabulary,
    "chat template": text.template,
    "served prompts": served.prompts,
    "supervision": text.supervision,
    "evaluation prompts": text.evaluation,
    "GPUs": machine.gpus,
    "memory": machine.memory,
    "store": machine.store_room,
}


def static_checks(subject: Subject) -> list[Check]:
    """Every check, in the order of the table."""
    return [made(name, lambda check=check: check(subject)) for name, check in CHECKS.items()]  # type: ignore[misc]


def before_regeneration(config: Config, target: dict[str, Any]) -> None:
    """What needs no rows, checked before the target is loaded to write them.

    Raises :class:`DraftsmithError` for layer ids, precision, draft vocabulary, a draft to begin with or a store that cannot work.
    """
    check_sizes(config, target)
    model.check_precision(hardware.target_dtype(config.target.dtype, target["torch_dtype"]), target)
    check_writable(Path(config.extract.store), "extract.store")
    # A new draft with a Llama layer in vLLM's own layout cannot be unfit, and PyTorch takes seconds to import.
    if config.train.source is not None or config.export.layouts or config.train.architecture != "llama":
        draft.check_draft(config, target)
