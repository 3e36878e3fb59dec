"""What each reason code of a stage means, from the modules that use it."""

from __future__ import annotations

from importlib import import_module

_READING = ("conversations", "conversations.tokenised", "tokenize.masking")
MODULES = {
    "tokenize": (*_READING, "tokenize.lengths", "tokenize.make_rows", "tokenize.evaluation_prompts", "tokenize"),
    "regenerate": (*_READING, "regenerate"),
}
"""Modules with a dictionary REASONS by the stage that counts with its codes; of equal codes the later ones' meaning holds."""


def meanings(stage: str) -> dict[str, str]:
    """Meaning by reason code, for the codes of tokenize.json or regenerate.json."""
    found: dict[str, str] = {}
    for name in MODULES[stage]:
        found |= import_module(f"draftsmith.{name}").REASONS
    return found
