"""More layouts of the same draft: SGLang's, and that of EAGLE's own repository ("hf"), which vLLM reads as well.

Both have the layer's sizes at the top of config.json and call the layer ``midlayer``; neither needs an embedding, as each server
takes the target's. They differ in what a layer id means: to SGLang k is the output of layer k (``set_eagle3_layers_to_capture``
adds one), to vLLM the input of layer k. EAGLE's own code captures [2, n // 2, n - 3] whatever the file says.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.config import SGLANG
from draftsmith.errors import DraftsmithError
from draftsmith.export_draft.checks import expected_tensors
from draftsmith.export_draft.settings import eagle_keys
from draftsmith.files import atomic_path, read_json, write_json

if TYPE_CHECKING:
    from torch import Tensor

    from draftsmith.draft.config import DraftShape

_LAYER, _MIDLAYER = "layers.0.", "midlayer."
# The first version of SGLang in which llama_eagle3.py reads fc_norm, norm_output and num_aux_hidden_states, and which has
# kimi_k25_eagle3.py, the draft with latent attention.
_SWITCHES_SINCE = "0.5.12"


def check_layouts(layouts: list[str], shape: DraftShape) -> None:
    """Fail where a server of one of ``layouts`` would run this draft as another than it is."""
    if shape.latent is not None and "hf" in layouts:
        raise DraftsmithError(
            "export.layouts: a draft with latent attention has EAGLE's layout in its main folder already; leave hf out"
        )
    if "sglang" not in layouts:
        return
    for name, right in SGLANG.items():
        if getattr(shape, name) != right:
            raise DraftsmithError(
                f"export.layouts: SGLang runs every draft as if {name} were {str(right).lower()}; "
                f"train with train.{name}: {str(right).lower()}, or leave sglang out"
            )
    if shape.attention_window is not None:
        raise DraftsmithError(
            "export.layouts: SGLang runs every draft on the whole context; train without train.attention_window, or leave sglang out"
        )
    if 0 in shape.layers:
        raise DraftsmithError(
            f"export.layouts: SGLang takes the outputs of layers, and the draft the inputs of {list(shape.layers)}, of which that of "
            "layer 0 is no layer's output; choose ids above 0 in target.layers, or leave sglang out"
        )


def write_layout(layout: str, folder: Path, tensors: Mapping[str, Tensor], shape: DraftShape, dtype: str) -> str:
    """Write ``tensors``, as the main folder has them, into ``folder`` and check what is there; what it holds, in words.

    Raises :class:`DraftsmithError` naming the first tensor or key that is not as a server of ``layout`` needs it.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder / "model.safetensors") as temporary:
        save_file({layout_name(name): tensor for name, tensor in tensors.items()}, temporary, metadata={"format": "pt"})
    write_json(folder / "config.json", layout_config(layout, shape, dtype))
    return _check(layout, folder, tensors, shape)


def layout_name(name: str) -> str:
    """The name of a tensor in these layouts."""
    return _MIDLAYER + name.removeprefix(_LAYER) if name.startswith(_LAYER) else name


def layout_config(layout: str, shape: DraftShape, dtype: str) -> dict[str, Any]:
    """The content of config.json."""
    ids = [layer_id - 1 for layer_id in shape.layers] if layout == "sglang" else list(shape.layers)
    settings = eagle_keys(shape, ids, dtype) | {
        # EAGLE's own fc is without one only if the file says so.
        "bias": False,
        "torch_dtype": dtype,
        # Readers older than transformers 5 know these two instead of rope_parameters.
        "rope_theta": shape.rope["rope_theta"],
    }
    if layout == "hf":
        # vLLM's own name for inputs of layers; without it a reader may take the ids for SGLang's.
        settings["eagle_aux_hidden_state_layer_ids"] = ids
    scaling = {name: value for name, value in shape.rope.items() if name != "rope_theta"}
    if scaling["rope_type"] != "default":
        settings["rope_scaling"] = scaling
    return settings


def _check(layout: str, folder: Path, tensors: Mapping[str, Tensor], shape: DraftShape) -> str:
    from draftsmith.draft.warm_start import source_tensors

    settings, read = read_json(folder / "config.json"), source_tensors(folder)
    expected = expected_tensors(shape)
    if set(read) != set(expected):
        raise DraftsmithError(
            f"{folder}: lacks tensors {sorted(set(expected) - set(read))} and has {sorted(set(read) - set(expected))} "
            "that no server loads; run export_draft again"
        )
    for name, tensor in read.items():
        if tuple(tensor.shape) != expected[name] or not tensor.equal(tensors[name]):
            raise DraftsmithError(
                f"{folder}: {layout_name(name)} is not the one that was exported; run export_draft again"
            )
    ids = settings["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    # Older ones take any draft to have three layers, a Llama layer, and neither switch.
    newer = layout == "sglang" and (
        shape.fc_norm or shape.norm_output or len(shape.layers) != 3 or shape.latent is not None
    )
    return f"{len(read)} tensors, layers {ids} as {layout} counts them" + (
        f", for SGLang {_SWITCHES_SINCE} or newer" if newer else ""
    )
