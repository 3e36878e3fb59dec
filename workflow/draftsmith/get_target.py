"""get_target: put the target's checkpoint into a folder and describe it in target.json.

A folder is used in place and described in milliseconds; neither torch nor transformers is imported for it. A hub id is
fetched by ``huggingface_hub`` (pinned to the commit that was found). ``package:NAME`` is a GGUF file that an installed
Python package ships, unpacked once to a bfloat16 safetensors checkpoint.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import time
import uuid
from pathlib import Path
from typing import Any

from draftsmith.config import Config
from draftsmith.errors import DraftsmithError
from draftsmith.files import at_home, fsync_folder, write_json
from draftsmith.log import log
from draftsmith.target_fingerprint import fingerprints
from draftsmith.target_sizes import check_sizes
from draftsmith.weight_files import INDEX, read_config, weight_map, whole_head

_PACKAGE = "package:"
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")
# Everything but pickles, GGUF files and other frameworks' weights.
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.tiktoken", "*.txt", "*.jinja", "*.py"]
_TOKENIZER_FILES = [
    "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "*.model", "*.tiktoken", "chat_template*", "additional_chat_templates/*", "tokenization_*.py", "tekken.json",
]  # fmt: skip
# What from_pretrained and save_pretrained leave behind and no reader needs; paths among it would differ by machine.
_JUNK = {
    "_model_name_or_path", "_name_or_path", "_from_model_config", "is_local", "local_files_only", "output_attentions", "output_hidden_states",
}  # fmt: skip
# A conversion takes half a minute; what is older was left by a process that was killed.
_ABANDONED_SECONDS = 3600
# Where multimodal checkpoints keep the sizes of their language model, one inside of the other where there are two.
_TEXT_CONFIGS = ("thinker_config", "text_config", "llm_config", "language_config")
# Dictionaries of a config under keys with these words belong to towers.
_TOWERS = ("vision", "visual", "vit_", "audio", "speech")
_SIZES = {
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    # Models without a table or rotation of positions have none.
    "max_positions": ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "max_seq_len"),
}


def run(config: Config, *, cache: Path, target: Path, whole: Config | None = None) -> None:
    """Resolve ``config.target`` and write ``target`` (target.json).

    Checkpoints that have to be made or fetched go to ``cache``. ``whole`` is the config of the run: layer ids and a draft
    vocabulary that the target does not have are refused here, by :class:`DraftsmithError`, though none of them changes
    what is written.
    """
    source = config.target.source
    started = time.monotonic()
    revision = config.target.revision
    local = local_folder(source)
    if local is not None:
        folder = local
    elif source.startswith(_PACKAGE):
        folder = _from_package(source.removeprefix(_PACKAGE), cache)
    else:
        folder, revision = _from_hub(source, revision, cache)
    described = describe(
        folder.resolve(),
        source=source,
        revision=revision,
        trust_remote_code=config.target.trust_remote_code,
    )
    if whole is not None:
        check_sizes(whole, described)
    write_json(target, described)
    log(
        f"target {source}: {described['model_type']}, {described['num_layers']} layers of width "
        f"{described['hidden_size']}, vocabulary {described['vocab_size']} "
        f"({time.monotonic() - started:.1f} s)"
    )


def local_folder(source: str) -> Path | None:
    """The folder that ``source`` (target.source) names, there or not; None for a hub id or a package."""
    if source.startswith(_PACKAGE):
        return None
    path = at_home(source)
    return path if path.exists() or not _HUB_ID.match(source) else None


def check_folder(folder: Path, source: str) -> None:
    """Fail unless ``folder``, which ``source`` (target.source) names, is there and has a config.json.

    Raises :class:`DraftsmithError`.
    """
    if not folder.is_dir():
        raise DraftsmithError(
            f"{folder}: no such folder; target.source ({source}) must be a folder with a checkpoint, a hub id or package:NAME"
        )
    if not (folder / "config.json").is_file():
        raise DraftsmithError(
            f"{folder}: holds no config.json; target.source ({source}) must name the folder of a checkpoint"
        )


def describe(folder: Path, *, source: str, revision: str | None, trust_remote_code: bool) -> dict[str, Any]:
    """The content of target.json for the checkpoint in ``folder``.

    Raises :class:`DraftsmithError` when it is no checkpoint or lacks safetensors files or a tokenizer.
    """
    told = outline(folder, source=source, trust_remote_code=trust_remote_code)
    weights = weight_files(folder, source)
    tokenizer_files = sorted({path for name in _TOKENIZER_FILES for path in folder.glob(name) if path.is_file()})
    if not tokenizer_files:
        raise DraftsmithError(
            f"{folder}: holds no tokenizer files (target.source: {source}); save the tokenizer beside the model"
        )
    return {
        "source": source,
        "revision": revision,
        "path": str(folder),
        **told,
        "trust_remote_code": trust_remote_code,
        **fingerprints(folder, tokenizer_files, weights, revision, trust_remote_code),
    }


def outline(folder: Path, *, source: str, trust_remote_code: bool) -> dict[str, Any]:
    """What of target.json config.json alone tells; nothing else need be in ``folder``.

    Raises :class:`DraftsmithError` when there is none, or a size is in it nowhere.
    """
    settings = _read_config(folder, source)
    parts = _parts(settings)
    sizes = _sizes(parts, folder, trust_remote_code)
    dtype = next((part[key] for part in parts for key in ("dtype", "torch_dtype") if part.get(key)), None)
    return {
        "model_type": settings.get("model_type") or "unknown",
        "architectures": settings.get("architectures") or [],
        **sizes,
        "longrope_after": _longrope_after(parts, folder),
        "torch_dtype": dtype or "float32",
        "multimodal": len(parts) > 1
        or any(isinstance(value, dict) and any(word in key for word in _TOWERS) for key, value in settings.items()),
    }


def language_parts(folder: Path, source: str) -> list[dict[str, Any]]:
    """config.json of ``folder`` and what it holds of its language model, the innermost first."""
    return _parts(_read_config(folder, source))


def weight_files(folder: Path, source: str) -> list[Path]:
    """The checkpoint's safetensors files, all of them there and of the length that they say.

    Raises :class:`DraftsmithError` otherwise.
    """
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise DraftsmithError(
            f"{folder}: holds no .safetensors files (target.source: {source}); convert the checkpoint with "
            "transformers' save_pretrained, since pickled weights are not loaded"
        )
    _check_shards(folder)
    for file in weights:
        whole_head(file)
    return weights


def _read_config(folder: Path, source: str) -> dict[str, Any]:
    check_folder(folder, source)
    return read_config(folder)


def _check_shards(folder: Path) -> None:
    named = sorted(set((weight_map(folder) or {}).values()))
    missing = [name for name in named if not (folder / name).is_file()]
    if missing:
        raise DraftsmithError(
            f"{folder}: {len(missing)} of {len(named)} weight files that {INDEX} names are missing, the first is "
            f"{missing[0]}; complete the download"
        )


def _parts(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The config and what it holds of its language model, the innermost first."""
    parts = [settings]
    while True:
        inner = next((parts[0][key] for key in _TEXT_CONFIGS if isinstance(parts[0].get(key), dict)), None)
        if inner is None:
            return parts
        parts.insert(0, inner)


def _sizes(parts: list[dict[str, Any]], folder: Path, trust_remote_code: bool) -> dict[str, int | None]:
    sizes = {name: _size(name, parts, folder) for name in _SIZES}
    if None in sizes.values():
        complete = _complete(folder, trust_remote_code)
        sizes = {
            name: value
            if value is not None
            else next((complete[key] for key in _SIZES[name] if complete.get(key)), None)
            for name, value in sizes.items()
        }
    for name, value in sizes.items():
        if value is None and name != "max_positions":
            raise DraftsmithError(
                f"{folder / 'config.json'}: names no {_SIZES[name][0]}, at the top or in text_config, and transformers "
                "knows no default of its model_type; add it, or set target.trust_remote_code if the checkpoint brings its own code"
            )
    return sizes


def _size(name: str, parts: list[dict[str, Any]], folder: Path) -> int | None:
    for part in parts:
        for key in _SIZES[name]:
            value = part.get(key)
            # For Python true is a number.
            if isinstance(value, int) and value is not True and value > 0:
                return value
            if isinstance(value, int) and name != "max_positions":
                raise DraftsmithError(
                    f"{folder / 'config.json'}: its {key} is {json.dumps(value)} and should be a number above 0; correct it, or fetch the file again"
                )
    return None


def _longrope_after(parts: list[dict[str, Any]], folder: Path) -> int | None:
    """Positions from which on a LongRoPE model turns by its long factors; None for other models."""
    for part in parts:
        key = "rope_parameters" if part.get("rope_parameters") else "rope_scaling"
        rope = part.get(key) or {}
        if not isinstance(rope, dict):
            raise DraftsmithError(
                f"{folder / 'config.json'}: its {key} is {rope!r} and should be an object; correct it"
            )
        # 'su' is what the first of these checkpoints call it.
        if (rope.get("rope_type") or rope.get("type")) in ("longrope", "su"):
            original = rope.get("original_max_position_embeddings") or part.get("original_max_position_embeddings")
            return int(original) if original else None
    return None


def _complete(folder: Path, trust_remote_code: bool) -> dict[str, Any]:
    """The language model's config with what the checkpoint leaves out, as it equals the defaults of the config's class."""
    from transformers import AutoConfig

    try:
        known = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception:
        # A model_type of its own code, or one that is newer than transformers: the checkpoint has to say it all.
        return {}
    return dict(known.get_text_config().to_dict())


def _from_hub(source: str, revision: str | None, cache: Path) -> tuple[Path, str]:
    """Fetch a hub id; returns the snapshot's folder and its commit."""
    import huggingface_hub

    log(f"target {source}: fetching from the hub, revision {revision or 'the newest'}")
    try:
        snapshot = huggingface_hub.snapshot_download(
            source, revision=revision, cache_dir=_hub_cache(cache), allow_patterns=_HUB_FILES
        )
    except Exception as error:
        # huggingface_hub, its HTTP client and the operating system each raise their own kinds; all mean 'not here'.
        reason = " ".join(str(error).split())[:200] or "no further text"
        raise DraftsmithError(
            f"target.source {source}: no such folder, and the hub did not give it (revision {revision or 'newest'}; "
            f"{type(error).__name__}: {reason}); check the name, HF_TOKEN and the network, or give a folder"
        ) from error
    # A snapshot's folder is named after its commit, so that a moving branch is pinned in target.json.
    return Path(snapshot), Path(snapshot).name


def _hub_cache(cache: Path) -> Path | None:
    """A folder of the workflow's own, as home folders are small; None, the hub's, where the user has named that one."""
    return None if {"HF_HOME", "HF_HUB_CACHE"} & os.environ.keys() else cache / "hub"


def _from_package(name: str, cache: Path) -> Path:
    """Convert the GGUF file that package ``name`` ships; a finished conversion is used again."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise DraftsmithError(
            f"target.source {_PACKAGE}{name}: no Python package {name} is installed; install it or name a folder or hub id"
        )
    files = sorted(path for place in spec.submodule_search_locations for path in Path(place).rglob("*.gguf"))
    if len(files) != 1:
        shown = ", ".join(path.name for path in files) or "none"
        raise DraftsmithError(
            f"target.source {_PACKAGE}{name}: the package must ship exactly one .gguf file; found {shown}"
        )
    folder = cache / f"{name}-{_version(name, files[0])}"
    # The folder was renamed into place when it was complete.
    if not folder.is_dir():
        _convert(files[0], folder)
    return folder


def _version(name: str, file: Path) -> str:
    distributions = importlib.metadata.packages_distributions().get(name)
    if distributions:
        return importlib.metadata.version(distributions[0])
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()[:12]


def _convert(file: Path, folder: Path) -> None:
    """Unpack a GGUF file to a bfloat16 checkpoint in ``folder``, which appears only when it is complete."""
    log(f"converting {file.name} to safetensors in {folder}, once")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"gguf_file": file.name, "dtype": torch.bfloat16}
    try:
        from transformers import GgufConfig
    except ImportError:
        # Older releases always dequantise.
        pass
    else:
        options["quantization_config"] = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(file.parent, **options)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if not tokenizer.chat_template:
        raise DraftsmithError(f"{file}: brings no chat template, so that it cannot be trained on conversations")
    model.generation_config.do_sample = False
    for left in folder.parent.glob(f".{folder.name}.*.tmp"):
        if time.time() - left.stat().st_mtime > _ABANDONED_SECONDS:
            shutil.rmtree(left, ignore_errors=True)
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
            _strip(temporary / name)
        for path in temporary.iterdir():
            # safetensors makes its files readable by their owner alone, other JSON by all.
            path.chmod(0o644)
            with open(path, "rb") as written:
                os.fsync(written.fileno())
        try:
            os.rename(temporary, folder)
        except OSError:
            # Another process was faster; both made the same.
            if not folder.is_dir():
                raise
        fsync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _strip(path: Path) -> None:
    if path.is_file():
        content = {key: value for key, value in json.loads(path.read_text()).items() if key not in _JUNK}
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
