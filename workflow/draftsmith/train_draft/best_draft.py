"""The weights of the best validated draft beside the checkpoints: a file for each step that a checkpoint has for its best.

A better validation may come long before the next checkpoint. A process that is killed between the two goes on from a checkpoint
that still knows the older one as the best, so that one stays until a finished checkpoint no longer does.
"""

from __future__ import annotations

import re
from pathlib import Path

import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor, uint8

from draftsmith.errors import DraftsmithError
from draftsmith.files import read_json
from draftsmith.train_draft import checkpoints, weights
from draftsmith.train_draft.judge import best

_NAME = re.compile(r"best-(\d+)\.safetensors")
# What versions before this one wrote: one file, of the step that its metadata tell, without a digest.
_OLD = "best.safetensors"


def path_of(folder: Path, step: int) -> Path:
    """Where the best draft is kept, if it is that of ``step``."""
    return folder / f"best-{step}.safetensors"


def keep(tensors: dict[str, Tensor], folder: Path, step: int) -> None:
    """Write the draft of ``step``, with a digest of its weights."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    weights.write(tensors, path_of(folder, step), {"step": str(step), "digest": _digest(tensors)})


def read(folder: Path, step: int) -> dict[str, Tensor] | None:
    """The draft of ``step``; None where it is not there or has suffered."""
    for path in (path_of(folder, step), folder / _OLD):
        try:
            tensors, noted = weights.read(path)
        except (OSError, SafetensorError):
            continue
        if noted.get("step") == str(step) and noted.get("digest", path.name == _OLD) in (_digest(tensors), True):
            return tensors
    return None


def forget(folder: Path, step: int | None) -> None:
    """Delete all but the draft of ``step`` and those that a complete checkpoint has for its best."""
    needed = {step}
    for checkpoint in checkpoints.checkpoints(folder):
        if checkpoints.fault(checkpoint, read=False) is None:
            try:
                top = best(read_json(checkpoint / "trainer_state.json")["log_history"])
            except (DraftsmithError, KeyError, TypeError, ValueError):
                # What it needs is not known, so everything may be needed.
                return
            needed.add(None if top is None else int(top["step"]))
    for path in folder.glob("best*.safetensors"):
        match = _NAME.fullmatch(path.name)
        if (match and int(match[1]) not in needed) or (path.name == _OLD and _step_of_old(path) not in needed):
            path.unlink(missing_ok=True)


def _step_of_old(path: Path) -> int | None:
    try:
        with safe_open(path, framework="pt") as file:
            return int((file.metadata() or {})["step"])
    except (OSError, SafetensorError, KeyError, ValueError):
        return -1


def _digest(tensors: dict[str, Tensor]) -> str:
    hasher = xxhash.xxh3_64()
    for name in sorted(tensors):
        hasher.update(name.encode())
        hasher.update(tensors[name].flatten().view(uint8).numpy().data)
    return hasher.hexdigest()
