"""Single tensors of the target's checkpoint, without building the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.errors import DraftsmithError
from draftsmith.few_layers import parts
from draftsmith.files import reason
from draftsmith.weight_files import head, read_config, weight_map

if TYPE_CHECKING:
    from torch import Tensor

_EMBEDDING = "embed_tokens.weight"
_HEAD = "lm_head.weight"
_QUANTISED = ("quantization_config", "compression_config")
# Bytes of a number of the types that a load casts to the precision asked for.
_CAST = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}


def tensor_files(folder: Path) -> dict[str, Path]:
    """Name of every tensor of the checkpoint, with the safetensors file that holds it."""
    listed = weight_map(folder)
    if listed is not None:
        return {name: folder / file for name, file in listed.items()}
    names: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with _opened(file) as opened:
            names.update(dict.fromkeys(opened.keys(), file))
    return names


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """A safetensors file of the checkpoint; one sentence where it is gone, cut off or broken since it was described."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        raise DraftsmithError(
            f"{file}: the weights cannot be read ({reason(error)}); copy or fetch the file again"
        ) from error


def read_tensors(folder: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Read the named tensors, in the checkpoint's dtype.

    Raises :class:`DraftsmithError` when one is missing, or its file is.
    """
    files = tensor_files(folder)
    found: dict[str, Tensor] = {}
    for name in names:
        if name not in files:
            raise DraftsmithError(f"{folder}: the checkpoint has no tensor {name}; is it complete?")
        with _opened(files[name]) as opened:
            found[name] = opened.get_tensor(name)
    return found


def _by_suffix(folder: Path, suffix: str) -> Tensor | None:
    # Multimodal wrappers put 'language_model.' or 'model.language_model.' in front; towers have embeddings of other names.
    matches = sorted((name for name in tensor_files(folder) if name == suffix or name.endswith("." + suffix)), key=len)
    return read_tensors(folder, matches[:1])[matches[0]] if matches else None


def embedding_weight(folder: Path) -> Tensor:
    """The input embedding [vocabulary, width], in the checkpoint's dtype."""
    weight = _by_suffix(folder, _EMBEDDING)
    if weight is None:
        weight = _by_suffix(folder, "embedding.weight")
    if weight is None:
        raise DraftsmithError(f"{folder}: found no tensor {_EMBEDDING} in its safetensors files")
    return weight


def head_weight(folder: Path) -> Tensor:
    """The output head [vocabulary, width]: lm_head, or the input embedding where the two are tied."""
    weight = _by_suffix(folder, _HEAD)
    return embedding_weight(folder) if weight is None else weight


def loaded_bytes(folder: Path, dtype: str) -> int:
    """Bytes of the checkpoint's weights once they are loaded in ``dtype``, by the heads of its safetensors files.

    A quantised checkpoint keeps its own types. Towers that a text-only engine leaves out are counted with the rest. Raises
    :class:`DraftsmithError` for a file that is gone, or whose head is broken.
    """
    settings = read_config(folder)
    quantised = any(part.get(key) for part in parts(settings) for key in _QUANTISED)
    listed = weight_map(folder)
    named = None if listed is None else set(listed.values())
    # Some checkpoints hold their weights twice, the second time as one file for another program.
    files = sorted(folder.glob("*.safetensors")) if named is None else [folder / name for name in sorted(named)]
    if not files:
        raise DraftsmithError(f"{folder}: its .safetensors files are gone; put them back, and run get_target again")
    total = 0
    for file in files:
        for name, entry in head(file)[1].items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                item = None if quantised else _CAST.get(entry["dtype"])
                total += (end - start) if item is None else (end - start) // item * _ITEM[dtype]
    return total
