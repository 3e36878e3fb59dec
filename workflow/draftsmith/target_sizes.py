"""Whether what a config asks of its target lies within the target's sizes, which are known before anything is loaded."""

from __future__ import annotations

from typing import Any

from draftsmith.config import Config
from draftsmith.errors import DraftsmithError
from draftsmith.layers import resolve_layers


def check_sizes(config: Config, target: dict[str, Any]) -> None:
    """Fail unless the layer ids are the target's, and the draft vocabulary is no larger than the target's.

    ``target`` is target.json's content. Raises :class:`DraftsmithError` naming the key.
    """
    resolve_layers(config.target.layers, target["num_layers"])
    # A draft that training goes on from brings its vocabulary along.
    size = config.vocabulary.size if config.train.source is None else None
    if size is not None and size > target["vocab_size"]:
        raise DraftsmithError(
            f"vocabulary.size is {size}, the target has {target['vocab_size']} tokens; lower it, or set it to null"
        )
