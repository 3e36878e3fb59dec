"""Checks of the draft to be trained: its shape, the one that it begins with, and the layouts that it is to be exported in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from draftsmith import vllm_compat
from draftsmith.config import Config
from draftsmith.errors import DraftsmithError
from draftsmith.layers import resolve_layers
from draftsmith.preflight.subject import Subject, needed
from draftsmith.verdict import Found

if TYPE_CHECKING:
    from draftsmith.draft.config import DraftShape


def draft(subject: Subject) -> Found:
    """Training can begin as the config has it, and each of ``export.layouts`` can hold what it ends with."""
    needed(lambda: subject.layers, "layers")
    return "ok", check_draft(subject.config, subject.target)


def check_draft(config: Config, target: dict[str, Any]) -> str:
    """What training begins with, in words.

    Reads a draft that it goes on from (``train.initial_draft``), but nothing of the target's weights, with whose embedding
    the training compares that draft's own. Raises :class:`DraftsmithError` naming the key or tensor that does not fit.
    """
    import torch

    from draftsmith.draft.config import draft_shape
    from draftsmith.draft.warm_start import source_vocabulary, warm_weights
    from draftsmith.export_draft.checks import expected_tensors
    from draftsmith.export_draft.layouts import check_layouts

    source, total = config.train.source, target["vocab_size"]
    ids = None if source is None else source_vocabulary(source, total)
    size = len(ids) if ids is not None else min(config.vocabulary.size or total, total)
    described = target | {"layers": resolve_layers(config.target.layers, target["num_layers"])}
    shape = draft_shape(described, config.train, size)
    check_layouts(list(config.export.layouts), shape)
    if shape.latent is None:
        check_llama(shape)
    else:
        check_latent(shape)
    sizes = f"width {shape.hidden_size}, {shape.heads} heads, {size:,} tokens"
    if source is None or ids is None:
        return f"a new draft: {sizes}"
    wanted = {
        name: torch.empty(dimensions, device="meta")
        for name, dimensions in expected_tensors(shape).items()
        if name not in ("d2t", "t2d")
    }
    none, threads = torch.empty(0, shape.hidden_size), torch.get_num_threads()
    # The engine may fork from this process later, and a pool of OpenMP's threads does not survive that.
    torch.set_num_threads(1)
    try:
        warm_weights(source, shape, ids - torch.arange(size), none, wanted)
    finally:
        torch.set_num_threads(threads)
    return f"training goes on from {source}: {sizes}"


def check_llama(shape: DraftShape) -> None:
    """Fail where transformers, whose config of the layer training and servers build, refuses the sizes of a Llama layer."""
    what = (
        f"the draft of this target would have {shape.heads} heads of {shape.head_dim} on {shape.kv_heads} key heads beside a width "
        f"of {shape.hidden_size}, which transformers refuses"
    )
    with _refused(what, "choose another target.source"):
        shape.rotated()
        _build(shape)


def check_latent(shape: DraftShape) -> None:
    """Fail where a server could not read a draft of ``shape``, which has latent attention."""
    with _refused("train.architecture: mla: transformers refuses the draft's sizes", "set train.architecture: llama"):
        _build(shape)
    if shape.rope["rope_type"] == "default" and not vllm_compat.latent_drafts_turn_plainly():
        raise DraftsmithError(
            f"train.architecture: mla: vLLM {vllm_compat.version()} serves such a draft with yarn alone, and the target has plain rope; "
            "install a newer vLLM, or set train.architecture: llama"
        )


@contextmanager
def _refused(what: str, mend: str) -> Iterator[None]:
    """Turn whatever a validator of transformers raises, which have errors of their own kinds, into a :class:`DraftsmithError`."""
    try:
        yield
    except Exception as error:
        raise DraftsmithError(f"{what} ({' '.join(str(error).split())}); {mend}") from error


def _build(shape: DraftShape) -> None:
    """Build the layer's config as a server will."""
    from transformers import AutoConfig

    from draftsmith.export_draft.settings import layer_config

    AutoConfig.for_model(**layer_config(shape))
