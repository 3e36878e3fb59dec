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
from draftsmith.files import atomic_path, read_json, read_object, reason, write_json, writing
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

# Keys that are read of target.json and train.json.
_OF_TARGET = ("source", "path", "fingerprint", "architectures", "num_layers", "hidden_size", "vocab_size")
_OF_TRAINING = ("fingerprint", "layers", "params", "steps", "epochs", "tokens", "simulated_acceptance_length")


def run(
    config: Config, *, target: Path, draft: Path, vocabulary: Path, train_report: Path, folder: Path, report: Path
) -> None:
    """Write config.json, model.safetensors and README.md into ``folder``, each of ``export.layouts`` into a subfolder of its
    name, and the checks that they passed to ``report``.

    Raises :class:`DraftsmithError` naming the first tensor or key that is not as a server needs it, or not as it was in training.
    """
    from draftsmith.draft.config import draft_shape
    from draftsmith.draft.initial import read_vocabulary
    from draftsmith.draft.trained_as import check_trained_as, told_by, trained_as

    described, trained = read_object(target, *_OF_TARGET), read_object(train_report, *_OF_TRAINING)
    described["layers"] = trained["layers"]
    d2t = read_vocabulary(vocabulary)
    shape = draft_shape(described, config.train, len(d2t))
    weights, metadata = _trained(draft)
    if metadata.get("fingerprint") != trained["fingerprint"]:
        raise DraftsmithError(
            f"{draft} comes from the training {metadata.get('fingerprint')} and {train_report} tells of {trained['fingerprint']}; "
            "run train_draft again"
        )
    paths = {"draft": draft, "target": target, "vocabulary": vocabulary, "train_report": train_report}
    check_trained_as(told_by(metadata), trained_as(shape, d2t, described), paths)
    check_layouts(list(config.export.layouts), shape)
    with writing(folder, "export_draft"):
        checks = _export(config, described, shape, weights, d2t, folder)
        checks += _more_layouts(config, described, shape, weights, d2t, folder)
        card = model_card(config, described, shape, trained, read_json(folder / "config.json"))
        with atomic_path(folder / "README.md") as temporary:
            temporary.write_text(card)
        size = (folder / "model.safetensors").stat().st_size
    with writing(report, "export_draft"):
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

    described = read_object(target, *_OF_TARGET) | {"layers": layers}
    d2t = read_vocabulary(vocabulary)
    shape = draft_shape(described, config.train, len(d2t))
    head = target_head(described, shape)
    # The server shares the target's embedding, so none is needed here.
    model = initial_draft(shape, head[:0], head, d2t, config.train.seed, config.train.source)
    with writing(folder, "evaluate_draft"):
        _export(config, described, shape, model.state_dict(), d2t, folder)


def _trained(draft: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The trained weights and their file's metadata."""
    from safetensors import SafetensorError

    from draftsmith.train_draft import weights

    try:
        return weights.read(draft)
    except (OSError, SafetensorError) as error:
        raise DraftsmithError(
            f"{draft}: the trained draft cannot be read ({reason(error)}); run train_draft again"
        ) from error


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
