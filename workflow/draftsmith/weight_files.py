"""A checkpoint's files, as far as they are read without loading a tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftsmith.errors import DraftsmithError

INDEX = "model.safetensors.index.json"
# More than the head of any checkpoint; what claims to have a longer one is something else.
_LONGEST_HEAD = 1 << 28


def head(file: Path) -> tuple[bytes, dict[str, Any]]:
    """The head of a safetensors file: as it lies there, without the 8 bytes of its length, and its entries by tensor.

    Raises :class:`DraftsmithError` when the file is none, or cannot be read.
    """
    try:
        with open(file, "rb") as opened:
            text = opened.read(min(int.from_bytes(opened.read(8), "little"), _LONGEST_HEAD))
    except FileNotFoundError:
        raise DraftsmithError(f"{file}: is gone; put the checkpoint's files back, or fetch it again") from None
    except IsADirectoryError:
        raise DraftsmithError(f"{file}: is a folder with the name of weights; give it another name") from None
    except OSError as error:
        raise DraftsmithError(f"{file}: cannot be read ({error.strerror}); make it readable for this user") from None
    try:
        entries = json.loads(text)
        if not all(_sound(entry) for name, entry in entries.items() if name != "__metadata__"):
            raise TypeError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DraftsmithError(f"{file}: not a safetensors file; fetch it again") from None
    return text, entries


def _sound(entry: dict[str, Any]) -> bool:
    begin, end = entry["data_offsets"]
    return type(begin) is type(end) is int and 0 <= begin <= end and isinstance(entry["dtype"], str)


def whole_head(file: Path) -> dict[str, Any]:
    """The entries of :func:`head`, of a file that is as long as they say: a download that was cut off is found before the load.

    Raises :class:`DraftsmithError` otherwise.
    """
    text, entries = head(file)
    ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
    expected, actual = 8 + len(text) + max(ends, default=0), file.stat().st_size
    if actual != expected:
        raise DraftsmithError(f"{file}: is {actual} bytes long and should be {expected}; complete the download")
    return entries


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint; raises :class:`DraftsmithError` when it is broken, or gone since it was described."""
    path = folder / "config.json"
    found = _parsed(path, "put it back, and run get_target again", "fetch the checkpoint again")
    if not isinstance(found, dict):
        raise DraftsmithError(f"{path}: holds no JSON object; fetch the checkpoint again")
    return found


def weight_map(folder: Path) -> dict[str, str] | None:
    """The file that holds each tensor, by the checkpoint's index; None where it has none.

    Raises :class:`DraftsmithError` for an index that is cut off, or is none.
    """
    index = folder / INDEX
    if not index.is_file():
        return None
    found = _parsed(index, "make it readable for this user", "fetch it again")
    named = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(named, dict) or not named or not all(isinstance(name, str) for name in named.values()):
        raise DraftsmithError(f"{index}: has no weight_map from tensors to files; fetch it again")
    return named


def _parsed(path: Path, unread: str, broken: str) -> Any:
    """A JSON file of the checkpoint; ``unread`` and ``broken`` are the mends where it cannot be read, or is none."""
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise DraftsmithError(f"{path}: cannot be read ({error.strerror}); {unread}") from None
    except ValueError as error:
        raise DraftsmithError(f"{path}: not valid JSON ({error}); {broken}") from None
