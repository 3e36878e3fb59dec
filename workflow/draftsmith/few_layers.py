"""A checkpoint's config for the same model with fewer layers: the first ones, but some of every kind.

Nothing else is changed: widths, experts, quantisation, heads and vocabulary stay, so that the engine takes the same paths.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

# Names of the number of layers.
_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
# Where multimodal checkpoints keep the config of their language model.
_TEXTS = ("text_config", "llm_config", "language_config")
# Sub-configs of other parts than the language model, which may have as many layers by chance.
_OTHERS = re.compile(r"vision|visual|vit_|image|audio|speech|video|projector|quantization|compression|rope")
# From this layer on the kind is another one: dense layers come first, then a mixture of experts.
_STARTS = re.compile(r"^(first_k_dense_replace|n(um)?_dense_layers|moe_layer_start_index|\w+_layer_offset)$")
# Every so many layers one is of another kind.
_PERIODS = re.compile(r"(pattern|interval|period|freq|every_n(_layers?)?|(layer|sparse)_step)$")
# Lists of layer ids.
_IDS = re.compile(r"(layers|layer_ids|layer_idx|layer_indexes|layer_indices|attn_idxs)$")
# With this many layers it is still a small model; kinds that first appear behind them are left out.
_MOST = 12
# More kinds than this are a size that differs from layer to layer.
_KINDS = 8


def few_layers(settings: dict[str, Any], num_layers: int, least: int) -> tuple[dict[str, Any], int]:
    """(config.json's content for the same model with fewer layers, how many): at least ``least``, and all if there are not more.

    ``num_layers`` is how many it has. Lists with an entry a layer are shortened, wherever they lie.
    """
    every = list(parts(settings))
    count = min(max([least, *(_wanted(part, num_layers) for part in every)]), num_layers)
    made = shortened(settings, num_layers, count)
    if not any(part.get(name) == num_layers for part in every for name in _COUNTS):
        # Left out where it equals the default of the config's class.
        text = next((made[name] for name in _TEXTS if isinstance(made.get(name), dict)), made)
        text[_COUNTS[0]] = count
    return made, count


def shortened(settings: dict[str, Any], num_layers: int, count: int) -> dict[str, Any]:
    """A copy of ``settings``, a config or overrides of one, for ``count`` of its ``num_layers`` layers."""
    made: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value and all(name.isdecimal() for name in value):
            # Settings of single layers, by their ids.
            made[key] = {name: layer for name, layer in value.items() if int(name) < count}
        elif isinstance(value, dict):
            made[key] = value if _OTHERS.search(key) else shortened(value, num_layers, count)
        elif key in _COUNTS and value == num_layers:
            made[key] = count
        elif key == "num_kv_shared_layers" and isinstance(value, int):
            # The last layers take keys and values of earlier ones, which have to be there.
            made[key] = value if value < count else 0
        elif _one_a_layer(key, value, num_layers):
            made[key] = value[:count]
        elif _layer_ids(key, value, num_layers):
            # Some count from 1.
            made[key] = [layer for layer in value if layer <= count]
        else:
            made[key] = value
    return made


def _one_a_layer(key: str, value: Any, num_layers: int) -> bool:
    if isinstance(value, str):
        # NemotronH writes its kinds of layers as a word of as many letters.
        return key.endswith("pattern") and len(value) == num_layers
    return isinstance(value, list) and len(value) == num_layers and not key.endswith(("token_id", "token_ids"))


def _layer_ids(key: str, value: Any, num_layers: int) -> bool:
    return (
        isinstance(value, list)
        and bool(_IDS.search(key))
        and all(isinstance(layer, int) and not isinstance(layer, bool) and 0 <= layer <= num_layers for layer in value)
    )


def parts(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The config and every mapping within it that is about the language model."""
    yield settings
    for key, value in settings.items():
        if isinstance(value, dict) and not _OTHERS.search(key):
            yield from parts(value)


def _wanted(part: dict[str, Any], num_layers: int) -> int:
    """How many of the first layers have one of every kind that ``part`` tells of."""
    most = 0
    for key, value in part.items():
        if isinstance(value, int) and not isinstance(value, bool):
            if _STARTS.search(key) and value < num_layers:
                # Not cut off: without its experts the run would show little.
                most = max(most, value + 2)
            elif _PERIODS.search(key) and value <= _MOST:
                most = max(most, value)
        elif _one_a_layer(key, value, num_layers):
            kinds = [json.dumps(kind, sort_keys=True) for kind in value]
            firsts = [kinds.index(kind) + 1 for kind in set(kinds)]
            if len(firsts) <= _KINDS:
                most = max(most, *(first for first in firsts if first <= _MOST))
        elif _layer_ids(key, value, num_layers) and value and min(value) < _MOST:
            most = max(most, min(value) + 1)
    return most
