"""The draft's weights as files: whole, whatever process holds which part, and errors of the disk in one sentence."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from draftsmith.errors import DraftsmithError
from draftsmith.files import atomic_path, free_bytes, reason
from draftsmith.train_draft import checkpoints

# What torch's writer calls an error of the disk; it is a plain RuntimeError.
_TORCH_WRITER = ("inline_container", "PytorchStreamWriter", "unexpected pos")


def whole(module: nn.Module) -> dict[str, Tensor]:
    """Weights of ``module`` by name, contiguous; where they are spread over processes all must call this, and the first gets them."""
    weights = module.state_dict()
    if any(hasattr(tensor, "full_tensor") for tensor in weights.values()):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        weights = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {name: tensor.contiguous() for name, tensor in weights.items()}


def write(weights: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write ``weights`` as safetensors, atomically."""
    with atomic_path(path) as temporary:
        save_file(weights, temporary, metadata={"format": "pt"} | metadata)


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors file, and its metadata."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


@contextmanager
def told(place: Path, step: int, folder: Path) -> Iterator[None]:
    """Turn an error of the disk at ``place`` into a :class:`DraftsmithError`.

    ``folder`` is that of the checkpoints: one that is half-written goes, those that were finished stay.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if type(error) is RuntimeError and not any(word in str(error) for word in _TORCH_WRITER):
            raise
        shutil.rmtree(folder / checkpoints.STAGING, ignore_errors=True)
        last = checkpoints.newest(folder)
        kept = f"goes on from step {checkpoints.step_of(last)}" if last else "begins anew"
        raise DraftsmithError(
            f"{place}: what training has learnt by step {step} could not be written "
            f"({reason(error)}); make room there ({free_bytes(place) / 2**30:.1f} GiB are free), and the same command {kept}"
        ) from error
