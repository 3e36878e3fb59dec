"""The target by its config.json alone: a folder, a part of the hub's cache, or the head of a GGUF file; never its weights."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from draftsmith import get_target
from draftsmith.config import Config
from draftsmith.errors import DraftsmithError
from draftsmith.estimate import slurm
from draftsmith.layers import resolve_layers

# The folder that the rule get_target is given.
_CACHE = Path("resources/targets")
_PACKAGE = "package:"
_SMALL = (
    "config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


@dataclass(frozen=True)
class Subject:
    """``outline`` is what target.json would have without weights, ``text`` the language model's config, ``parts`` all configs."""

    config: Config
    read_from: str
    folder: Path | None
    outline: dict[str, Any]
    parts: list[dict[str, Any]]
    layers: list[int]
    dtype: str
    device: Literal["cuda", "cpu"]
    gguf_parameters: int | None = None

    @property
    def text(self) -> dict[str, Any]:
        """The language model's config."""
        return self.parts[0]

    @property
    def checkpoint_dtype(self) -> str:
        """Precision of the checkpoint's plain tensors, such as its embedding and its head."""
        return str(self.outline["torch_dtype"])


def subject(config: Config, results: Path, given: Path | None, device: str) -> tuple[Subject, str]:
    """The target of ``config`` and, for the list of assumptions, why its device was assumed.

    ``given`` is a folder to read instead of the config's. Raises :class:`DraftsmithError` where no config.json can be had.
    """
    kind, why = _device(config, device)
    source = config.target.source
    folder, read_from, parameters = given, str(given), None
    if folder is None:
        folder, read_from = _folder(config, results)
    if folder is None:
        outline, parts, parameters, read_from = _gguf(source)
    else:
        outline = get_target.outline(folder, source=source, trust_remote_code=False)
        parts = get_target.language_parts(folder, source)
    layers = resolve_layers(config.target.layers, outline["num_layers"])
    dtype = config.target.dtype
    if dtype == "auto":
        dtype = "float32" if kind == "cpu" else outline["torch_dtype"]
    return Subject(config, read_from, folder, outline, parts, layers, dtype, kind, parameters), why


def _device(config: Config, asked: str) -> tuple[Literal["cuda", "cpu"], str]:
    """Where it will run, which need not be here."""
    if asked != "auto":
        return ("cpu" if asked == "cpu" else "cuda"), f"it runs on {asked}, as --device says"
    if config.engine.device != "auto":
        return config.engine.device, f"it runs on {config.engine.device}, as engine.device says"
    from draftsmith import hardware

    if hardware.gpus():
        return "cuda", "it runs on GPUs, as this machine has some"
    if config.engine.tp > 1:
        return "cuda", f"it runs on GPUs, as engine.tp is {config.engine.tp}"
    if slurm.here():
        return "cuda", "it runs on GPUs, as there is Slurm here; --device cpu for a CPU"
    return "cpu", "it runs on a CPU, as this machine has no GPU; --device cuda for GPUs"


def _folder(config: Config, results: Path) -> tuple[Path | None, str]:
    source = config.target.source
    known = results / "target.json"
    if known.is_file():
        try:
            described = json.loads(known.read_text())
            folder = Path(described["path"])
            if described["source"] == source and (folder / "config.json").is_file():
                return folder, f"{folder} ({known})"
        except (ValueError, KeyError, TypeError):
            pass
    if source.startswith(_PACKAGE):
        # Unpacked already?
        found = sorted(_CACHE.glob(f"{source.removeprefix(_PACKAGE)}-*/config.json"))
        return (found[-1].parent, str(found[-1].parent)) if found else (None, "")
    path = get_target.local_folder(source)
    if path is not None:
        return path, str(path)
    return _from_hub(source, config.target.revision)


def _from_hub(source: str, revision: str | None) -> tuple[Path, str]:
    import logging

    import huggingface_hub

    # It tells of each try, and this is no place to wait for a network that is not there.
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    folder = None
    for name in _SMALL:
        try:
            # From the cache where it is there; a few kilobytes otherwise.
            path = huggingface_hub.hf_hub_download(source, name, revision=revision, cache_dir=_CACHE / "hub")
            folder = folder or Path(path).parent
        except Exception as error:
            # The hub, its HTTP client and the operating system each raise their own kinds.
            if folder is None:
                raise DraftsmithError(
                    f"target.source {source}: its config.json is not here and the hub did not give it ({type(error).__name__}); "
                    "copy that one file into a folder and name the folder with --target"
                ) from error
    assert folder is not None
    return folder, f"the hub's {source}"


def _gguf(source: str) -> tuple[dict[str, Any], list[dict[str, Any]], int, str]:
    """Sizes from the head of the one GGUF file that a package ships."""
    name = source.removeprefix(_PACKAGE)
    spec = importlib.util.find_spec(name)
    places = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    files = [path for place in places for path in place.rglob("*.gguf")]
    if len(files) != 1:
        raise DraftsmithError(
            f"target.source {source}: no installed package {name} ships exactly one .gguf file; install it or give --target"
        )
    import gguf

    reader = gguf.GGUFReader(files[0])

    def value(key: str) -> Any:
        field = reader.get_field(key)
        return None if field is None else field.contents()

    kind = value("general.architecture")
    text = {
        "num_hidden_layers": value(f"{kind}.block_count"), "hidden_size": value(f"{kind}.embedding_length"),
        "intermediate_size": value(f"{kind}.feed_forward_length"), "num_attention_heads": value(f"{kind}.attention.head_count"),
        "num_key_value_heads": value(f"{kind}.attention.head_count_kv"), "vocab_size": value(f"{kind}.vocab_size"),
        "max_position_embeddings": value(f"{kind}.context_length"), "model_type": kind, "tie_word_embeddings": True,
    }  # fmt: skip
    outline = {
        "model_type": kind, "num_layers": text["num_hidden_layers"], "hidden_size": text["hidden_size"],
        "vocab_size": text["vocab_size"], "max_positions": text["max_position_embeddings"], "torch_dtype": "bfloat16",
    }  # fmt: skip
    if None in outline.values():
        raise DraftsmithError(f"{files[0]}: its head lacks sizes; run get_target first, which unpacks it")
    return outline, [text], sum(int(tensor.n_elements) for tensor in reader.tensors), str(files[0])
