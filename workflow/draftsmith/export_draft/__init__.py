"""export_draft: write the trained draft in the form that a server loads, and check it tensor by tensor.

The form is that of vllm-project/speculators, because vLLM takes it both ways: as ``speculative_config.model`` beside a target,
and by itself, ``vllm serve FOLDER``, when it reads the target's name from the file. A draft with latent attention it takes in the
form of EAGLE's repository alone, beside a target. :mod:`draftsmith.export_draft.layouts` has the others.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from draftsmith.config import Config, Layout
from draftsmith.errors import DraftsmithError
from draftsmith.export_draft.card import model_card
from draftsmith.export_draft.checks import check, expected_tensors
from draftsmith.export_draft.layouts import check_layouts, write_layout
from draftsmith.export_draft.settings import draft_config, verifier
from draftsmith.export_draft.tensors import export_dtype, exported_tensors, vocabulary_tensors
from draftsmith.files import atomic_path, read_json, write_json
from draftsmith.log import log

if TYPE_CHECKING:
    from torch import Tensor

    from draftsmith.draft.config import DraftShape

__all__ = [
    "check",
    "draft_config",
    "expected_tensors",
    "model_card",
    "run",
    "untrained",
    "verifier",
    "vocabulary_tensors",
]


def run(
    config: Config, *, target: Path, draft: Path, vocabulary: Path, train_report: Path, folder: Path, report: Path
) -> None:
    """Write config.json, model.safetensors and README.md into ``folder``, each of ``export.layouts`` into a subfolder of its
    name, and the checks that they passed to ``report``.

    Raises :class:`DraftsmithError` naming the first tensor or key that is not as a server needs it.
    """
    from safetensors import safe_open

    from draftsmith.draft.config import draft_shape
    from draftsmith.draft.initial import read_vocabulary

    described, trained = read_json(target), read_json(train_report)
    described["layers"] = trained["layers"]
    d2t = read_vocabulary(vocabulary)
    shape = draft_shape(described, config.train, len(d2t))
    with safe_open(draft, framework="pt") as file:
        made_by = (file.metadata() or {}).get("fingerprint")
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if made_by != trained["fingerprint"]:
        raise DraftsmithError(
            f"{draft} comes from the training {made_by} and {train_report} tells of {trained['fingerprint']}; run train_draft again"
        )
    check_layouts(list(config.export.layouts), shape)
    checks = _export(config, described, shape, weights, d2t, folder)
    checks += _more_layouts(config, described, shape, weights, d2t, folder)
    card = model_card(config, described, shape, trained, read_json(folder / "config.json"))
    with atomic_path(folder / "README.md") as temporary:
        temporary.write_text(card)
    size = (folder / "model.safetensors").stat().st_size
    write_json(
        report,
        {
            "folder": str(folder),
            "bytes": size,
            "fingerprint": trained["fingerprint"],
            "verifier": verifier(described),
            "layouts": list(config.export.layouts),
            "checks": checks,
        },
    )
    how = f"vllm serve {folder}" if shape.latent is None else f"the command in {folder / 'README.md'}"
    log(f"exported to {folder} ({size / 1e6:.1f} MB, {len(checks)} checks passed); serve it with: {how}")


def untrained(config: Config, *, target: Path, layers: list[int], vocabulary: Path, folder: Path) -> None:
    """Export the draft that training starts from, new or not: what the trained one's acceptance is compared with.

    ``layers`` are the layer ids of the trained one.
    """
    from draftsmith.draft.config import draft_shape
    from draftsmith.draft.initial import initial_draft, read_vocabulary, target_head

    described = read_json(target) | {"layers": layers}
    d2t = read_vocabulary(vocabulary)
    shape = draft_shape(described, config.train, len(d2t))
    head = target_head(described, shape)
    # The server shares the target's embedding, so none is needed here.
    model = initial_draft(shape, head[:0], head, d2t, config.train.seed, config.train.source)
    _export(config, described, shape, model.state_dict(), d2t, folder)


def _export(
    config: Config, target: dict[str, Any], shape: DraftShape, weights: Mapping[str, Tensor], d2t: Tensor, folder: Path
) -> list[dict[str, str]]:
    """Write weights, then config.json, and check what was written."""
    from safetensors.torch import save_file

    dtype = export_dtype(config, target)
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder / "model.safetensors") as temporary:
        save_file(exported_tensors(weights, shape, d2t, dtype), temporary, metadata={"format": "pt"})
    write_json(folder / "config.json", draft_config(config, target, shape, _name(dtype)))
    return check(folder, target, shape)


def _more_layouts(
    config: Config, target: dict[str, Any], shape: DraftShape, weights: Mapping[str, Tensor], d2t: Tensor, folder: Path
) -> list[dict[str, str]]:
    """Write ``export.layouts`` and take away those of an earlier export, which hold other weights."""
    dtype = export_dtype(config, target)
    checks = []
    for layout in get_args(Layout):
        place = folder / layout
        if layout in config.export.layouts:
            tensors = exported_tensors(weights, shape, d2t, dtype)
            detail = write_layout(layout, place, tensors, shape, _name(dtype))
            checks.append({"name": f"layout {layout}", "status": "ok", "detail": detail})
        elif place.is_dir():
            shutil.rmtree(place)
    return checks


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
