"""Fingerprints of a checkpoint: one of all that its answers depend on, one of what its hidden states do.

Hashing half a terabyte would take as long as loading it. Every tensor gives a sample instead, so that a checkpoint of which
only some were trained on, such as one with a merged LoRA, is told from the one that it was made of.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from draftsmith.weight_files import head

_Span = tuple[int, int]
# What a file system reads at once at the least.
_PIECE = 4096
# Norms, biases and scales of a tensor are read whole.
_SMALL = 4 * _PIECE
# Embeddings, heads and wide layers: of a large tensor a part may be trained on alone, such as the rows of new tokens.
_LARGE, _OF_LARGE = 64 << 20, 17
_END = 1 << 16
# A read is a wait for the disk, on a network most of all: 200,000 tensors at a millisecond each take 6 s so.
_THREADS = 32
_TASK = 256
# Read by vLLM beside config.json: quantisation, and Mistral's own config.
_CONFIGS = ("config.json", "hf_quant_config.json", "quant_config.json", "quantize_config.json", "params.json")
# Weights of formats that have no list of tensors that could be read without loading them, for `engine.args.load_format`.
_OTHER_WEIGHTS = ("pytorch_model*.bin", "consolidated*.pth", "*.gguf")
_OF_OTHER = 1024
# Rows carry their tokens, so that what makes them changes no state.
_TOKENIZER_CODE = "tokenization_"


def states_fingerprint(target: Mapping[str, Any]) -> str:
    """What the states of ``target`` (target.json) depend on; the fingerprint of all, where an older version described it."""
    return str(target.get("states_fingerprint") or target["fingerprint"])


def fingerprints(
    folder: Path,
    tokenizer_files: Iterable[Path],
    weights: Iterable[Path],
    revision: str | None,
    trust_remote_code: bool,
) -> dict[str, str]:
    """``states_fingerprint`` and ``fingerprint`` of the checkpoint in ``folder``, as SHA-256 in hexadecimal.

    The first is of its configs, samples of its weights (``weights`` are its safetensors files), and
    its Python code where that runs. The second is of all that, its tokenizer's files and the revision.
    """
    states, whole = hashlib.sha256(), hashlib.sha256()
    for path in (folder / name for name in _CONFIGS):
        if path.is_file():
            _add(states, path.name, path.read_bytes())
    for path in sorted(folder.rglob("*.py")) if trust_remote_code else []:
        if path.is_file() and not path.name.startswith(_TOKENIZER_CODE):
            _add(states, path.relative_to(folder).as_posix(), path.read_bytes())
    others = sorted({path for kind in _OTHER_WEIGHTS for path in folder.glob(kind) if path.is_file()})
    for label, content in _weights([*weights], others):
        _add(states, label, content)
    _add(whole, "states", states.digest())
    _add(whole, "revision", (revision or "").encode())
    for path in tokenizer_files:
        _add(whole, path.relative_to(folder).as_posix(), path.read_bytes())
    return {"fingerprint": whole.hexdigest(), "states_fingerprint": states.hexdigest()}


def _add(digest: Any, label: str, content: bytes) -> None:
    digest.update(f"{label}\0{len(content)}\0".encode())
    digest.update(content)


def _weights(weights: Sequence[Path], others: Sequence[Path]) -> Iterator[tuple[str, bytes]]:
    """Name, size and head of every file, then the hashes of its samples, in an order that follows from the files alone."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="draftsmith-fingerprint") as pool:
        spans = [
            (path, text, _sampled(path, text, entries))
            for path, (text, entries) in zip(weights, pool.map(head, weights), strict=True)
        ]
        for path in others:
            size = path.stat().st_size
            spans.append((path, b"", [*_spread(0, size, _OF_OTHER), (max(0, size - _END), size)]))
        tasks = [(path, of_file[at : at + _TASK]) for path, _, of_file in spans for at in range(0, len(of_file), _TASK)]
        for path, text, _ in spans:
            yield path.name, str(path.stat().st_size).encode()
            yield "head", text
        for (path, _), read in zip(tasks, pool.map(lambda task: _read(*task), tasks), strict=True):
            yield path.name, read


def _sampled(path: Path, text: bytes, entries: Mapping[str, Any]) -> list[_Span]:
    """Which bytes of a safetensors file are read, from its beginning to its end."""
    start, size = 8 + len(text), path.stat().st_size
    tensors = sorted(tuple(entry["data_offsets"]) for name, entry in entries.items() if name != "__metadata__")
    found = [span for begin, end in tensors for span in _of_tensor(start + begin, start + end)]
    return [*found, (max(start, size - _END), size)]


def _of_tensor(begin: int, end: int) -> list[_Span]:
    size = end - begin
    if size <= _SMALL:
        return [(begin, end)] if size else []
    if size >= _LARGE:
        return _spread(begin, end, _OF_LARGE)
    middle = begin + (size - _PIECE) // 2
    return [(middle, middle + _PIECE)]


def _spread(begin: int, end: int, count: int) -> list[_Span]:
    """``count`` pieces at equal distances, the first at ``begin`` and the last up to ``end``; all where it is not more."""
    if end - begin <= count * _PIECE:
        return [(begin, end)]
    starts = [begin + place * (end - begin - _PIECE) // (count - 1) for place in range(count)]
    return [(start, start + _PIECE) for start in starts]


def _read(path: Path, spans: Sequence[_Span]) -> bytes:
    digest = hashlib.sha256()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if hasattr(os, "posix_fadvise"):
            # What comes next in the file is not wanted.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        for start, end in spans:
            _add(digest, "sample", os.pread(descriptor, end - start, start))
    finally:
        os.close(descriptor)
    return digest.digest()
