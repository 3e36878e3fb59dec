"""A draft that training goes on from: read from its folder, in any of the three layouts, and refused unless it fits.

speculators' layout keeps the layer's sizes in ``transformer_layer_config``; that of SGLang and of EAGLE's own repository keeps
them at the top, calls the layer ``midlayer`` and may bring the target's embedding along. A tensor too few or too many, or a
switch that stands otherwise, would be another draft under the same name, so each ends the training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.draft.config import DraftShape
from draftsmith.draft.warm_settings import check_settings, source_settings
from draftsmith.errors import DraftsmithError
from draftsmith.target_weights import read_tensors, tensor_files

if TYPE_CHECKING:
    from torch import Tensor

_EMBEDDING = "embed_tokens.weight"
_PICKLE = "pytorch_model.bin"
_CONVERT = (
    "import sys, torch, safetensors.torch as s; s.save_file(torch.load(sys.argv[1], weights_only=True), sys.argv[2])"
)
# What a shape is changed by, where a setting changes it.
_MEND = {"mlp": "set train.intermediate_size to the source's", "fc": "set target.layers to the source's"}


def source_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the draft in ``folder`` under the names that this package trains, in its own dtype; on the CPU.

    Raises :class:`DraftsmithError` when there is none.
    """
    if not (folder / "config.json").is_file():
        raise DraftsmithError(
            f"train.initial_draft: {folder} has no config.json; name the folder of an EAGLE-3 draft on this machine"
        )
    names = _readable(folder, tensor_files)
    if not names and (folder / _PICKLE).is_file():
        raise DraftsmithError(
            f"train.initial_draft: {folder / _PICKLE} is a pickle, which is not loaded; write it as safetensors: "
            f"python -c '{_CONVERT}' {_PICKLE} model.safetensors"
        )
    if not names:
        raise DraftsmithError(f"train.initial_draft: {folder} has no *.safetensors; is it all there?")
    tensors = {
        _own_name(name): tensor for name, tensor in _readable(folder, lambda place: read_tensors(place, names)).items()
    }
    if len(tensors) < len(names):
        twice = sorted(name for name in names if name != _own_name(name) and _own_name(name) in names)
        raise DraftsmithError(
            f"train.initial_draft: {folder} has {twice} under another name as well; leave one file or name of each in it"
        )
    return tensors


def _readable(folder: Path, read: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """What ``read`` gives of ``folder``; one sentence where a file is cut, lost, or none of its format."""
    from safetensors import SafetensorError

    try:
        return read(folder)
    except (DraftsmithError, OSError, SafetensorError, ValueError, LookupError, TypeError) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise DraftsmithError(
            f"train.initial_draft: the weights of {folder} cannot be read ({said}); copy or fetch them again"
        ) from error


def source_vocabulary(folder: Path, target_vocab: int) -> Tensor:
    """Target ids int64 [Vd] of the draft vocabulary of the draft in ``folder``, ascending."""
    from draftsmith.draft.teacher import target_ids

    try:
        return target_ids(_mapping(folder, source_tensors(folder), target_vocab), target_vocab)
    except DraftsmithError as error:
        if str(error).startswith("train.initial_draft"):
            raise
        raise DraftsmithError(
            f"train.initial_draft: d2t of {folder} does not ascend within the target's {target_vocab} tokens; "
            "name a draft of this target"
        ) from None


def source_digest(folder: Path) -> str:
    """16 hex digits over name, type, shape and bytes of every tensor of the draft in ``folder``, and its config."""
    import torch

    tensors = source_tensors(folder)
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def warm_weights(
    folder: Path, shape: DraftShape, d2t: Tensor, embedding: Tensor, wanted: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The source's weights, float32, for a draft of ``shape`` whose own are ``wanted``.

    ``d2t`` int64 [Vd] is the run's draft vocabulary; ``embedding`` [V, H] the target's, or [0, H] where the source's need not
    be compared with it. Raises :class:`DraftsmithError` naming the first key or tensor that does not fit.
    """
    tensors = source_tensors(folder)
    settings = source_settings(folder)
    check_settings(folder, settings, shape)
    _check_vocabulary(folder, tensors, shape, d2t)
    tensors.pop("d2t", None)
    tensors.pop("t2d", None)
    own = tensors.pop(_EMBEDDING, None)
    if own is not None and len(embedding):
        _check_embedding(folder, own, embedding)
    missing, surplus = sorted(set(wanted) - set(tensors)), sorted(set(tensors) - set(wanted))
    if missing or surplus:
        raise DraftsmithError(
            f"train.initial_draft: {folder} lacks the tensors {missing} and has {surplus}, which this draft does not have; "
            "name a one-layer EAGLE-3 draft of the same switches"
        )
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise DraftsmithError(
                f"train.initial_draft: {name} of {folder} is {tensor.dtype} and must be floating point; name a draft that is not quantised"
            )
        if tensor.shape != wanted[name].shape:
            mend = next(
                (text for part, text in _MEND.items() if part in name.split(".")), "name a draft of this target"
            )
            raise DraftsmithError(
                f"train.initial_draft: {name} of {folder} is {list(tensor.shape)} and must be {list(wanted[name].shape)}; {mend}"
            )
    warm = {name: tensor.float() for name, tensor in tensors.items()}
    # vLLM multiplies the draft's logits with it; here, and in what is exported, it is in the head.
    scale = settings.get("logit_scale")
    if scale is not None:
        warm["lm_head.weight"] = warm["lm_head.weight"] * float(scale)
    for name, tensor in warm.items():
        if not bool(tensor.isfinite().all()):
            raise DraftsmithError(
                f"train.initial_draft: {name} of {folder} has values that are not finite; name a draft that was trained well"
            )
    return warm


def _own_name(name: str) -> str:
    name = name.removeprefix("model.")
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def _check_vocabulary(folder: Path, tensors: Mapping[str, Tensor], shape: DraftShape, d2t: Tensor) -> None:
    import torch

    has = _mapping(folder, tensors, shape.target_vocab)
    if not torch.equal(has, d2t):
        raise DraftsmithError(
            f"train.initial_draft: d2t of {folder} names another draft vocabulary ({len(has)} tokens) than this run has "
            f"({len(d2t)}); run map_vocabulary again, which takes the source's"
        )


def _mapping(folder: Path, tensors: Mapping[str, Tensor], target_vocab: int) -> Tensor:
    """d2t int64 [Vd] of the source."""
    import torch

    given, head = tensors.get("d2t"), tensors.get("lm_head.weight")
    for name, tensor, dimensions in (("d2t", given, 1), ("lm_head.weight", head, 2)):
        if tensor is not None and tensor.dim() != dimensions:
            raise DraftsmithError(
                f"train.initial_draft: {name} of {folder} is of shape {list(tensor.shape)} and must have {dimensions} dimension(s); "
                "copy or fetch it again"
            )
    if given is not None and (given.is_floating_point() or given.dtype == torch.bool):
        raise DraftsmithError(
            f"train.initial_draft: d2t of {folder} is {given.dtype} and must be whole numbers; copy or fetch it again"
        )
    # Without one the draft has the target's whole vocabulary.
    mapping = torch.zeros(target_vocab, dtype=torch.int64) if given is None else given.to(torch.int64).cpu()
    if head is not None and len(head) != len(mapping):
        has = "no d2t" if given is None else f"a d2t of {len(mapping)} tokens"
        raise DraftsmithError(
            f"train.initial_draft: {folder} has {has}, and its lm_head gives {len(head)} of the target's {target_vocab} tokens; "
            "is it a draft of this target, with all its tensors?"
        )
    return mapping


def _check_embedding(folder: Path, own: Tensor, embedding: Tensor) -> None:
    import torch

    # The least precise of the two decides.
    least = min((own.dtype, embedding.dtype), key=lambda dtype: dtype.itemsize)
    if own.shape != embedding.shape or not torch.equal(own.to(least), embedding.to(least)):
        raise DraftsmithError(
            f"train.initial_draft: {_EMBEDDING} of {folder} is not the target's, which a draft here shares; "
            "name a draft that was trained with the target's embedding"
        )
