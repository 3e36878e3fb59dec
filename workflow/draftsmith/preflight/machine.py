"""Checks of the machine: GPUs, memory for the weights, room in the store."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil

from draftsmith import engine, get_target, hardware, store
from draftsmith.extract_shard import space
from draftsmith.extract_shard.plan import missing, stored_rows
from draftsmith.extract_shard.staging import unwritable
from draftsmith.preflight.subject import Subject, needed
from draftsmith.target_fingerprint import states_fingerprint
from draftsmith.target_weights import loaded_bytes
from draftsmith.verdict import Found, Status

GIB = 1 << 30


def gpus(subject: Subject) -> Found:
    """As many GPUs were granted as tensor parallelism needs, and their memory is free."""
    engine.check_granted(subject.config, subject.granted)
    if subject.on_cpu:
        return "ok", f"none; {len(hardware.cores())} CPU cores"
    used = hardware.gpus()[: subject.config.engine.tp]
    need = subject.config.engine.gpu_memory_utilization
    names = f"{len(used)} x {used[0].name}, {used[0].total / GIB:.0f} GiB"
    full = [gpu for gpu in used if 1 - gpu.used / gpu.total < need]
    if full:
        return "fail", (
            f"{names}; GPU {full[0].index} has {(full[0].total - full[0].used) / GIB:.0f} GiB free, less than "
            f"engine.gpu_memory_utilization ({need}) of its memory; free it, or lower the key"
        )
    return "ok", names


def memory(subject: Subject) -> Found:
    """The checkpoint's weights are there still, and have room: on a CPU in main memory, on GPUs in each one's share."""
    get_target.weight_files(subject.folder, str(subject.target.get("source", "?")))
    weights = loaded_bytes(subject.folder, subject.dtype) / GIB
    return _main_memory(subject, weights) if subject.on_cpu else _gpu_memory(subject, weights)


def _too_much(subject: Subject) -> tuple[Status, str]:
    # vLLM's own quantisation makes them smaller, by what only it knows.
    return (
        ("warn", ", before engine.args.quantization")
        if subject.config.engine.args.get("quantization")
        else ("fail", "")
    )


def _main_memory(subject: Subject, weights: float) -> Found:
    status, before = _too_much(subject)
    settings, main = subject.config.engine, psutil.virtual_memory()
    # Each rank holds its part of the weights, and a KV cache of its own.
    cache = settings.kv_cache_gib * settings.tp
    detail = (
        f"{weights:.1f} GiB of weights{before} and {cache:g} GiB of KV cache; "
        f"{main.available / GIB:.1f} of {main.total / GIB:.1f} GiB are free"
    )
    if weights > main.total / GIB:
        return status, f"{detail}; take a smaller target"
    if cache > main.total / GIB:
        return "fail", f"{detail}; lower engine.kv_cache_gib"
    if weights + cache > main.available / GIB:
        return "warn", f"{detail}; lower engine.kv_cache_gib or end other programs"
    return "ok", detail


def _gpu_memory(subject: Subject, weights: float) -> Found:
    needed(lambda: engine.check_granted(subject.config, subject.granted), "GPUs")
    status, before = _too_much(subject)
    settings = subject.config.engine
    each = weights / settings.tp
    share = min(gpu.total for gpu in hardware.gpus()[: settings.tp]) / GIB * settings.gpu_memory_utilization
    detail = (
        f"{weights:.1f} GiB of weights{before}, {each:.1f} on each of {settings.tp} GPUs that may fill {share:.1f} GiB"
    )
    room = share + float(settings.args.get("cpu_offload_gb", 0))
    if each >= room:
        return (
            status,
            f"{detail}; raise engine.tp, or engine.gpu_memory_utilization ({settings.gpu_memory_utilization})",
        )
    return "ok", f"{detail}: {room - each:.1f} are left for the KV cache and the step"


def store_room(subject: Subject) -> Found:
    """What the store lacks can be written and fits on its disk."""
    config, target = subject.config, subject.target
    root = Path(config.extract.store)
    layers = needed(lambda: subject.layers, "layers")
    storage = config.extract.storage
    key = store.fingerprint(states_fingerprint(target), layers, subject.dtype, config.engine.args, storage)
    refusal = unwritable(root / key)
    index = store.scan(root / key, key)
    rows = set(stored_rows(subject.rows, config.extract.supervised_only).values())
    todo = missing(list(rows), index.rows)
    if refusal is not None:
        if todo:
            raise refusal
        return "ok", f"{root / key}: it cannot be written, and holds all {len(rows)} rows"
    per_token = store.bytes_per_token(len(layers), target["hidden_size"], subject.dtype, storage)
    need, free = space.needed(sum(row.length for row in todo), per_token), shutil.disk_usage(root).free
    detail = (
        f"{root / key}: {len(rows) - len(todo)} of {len(rows)} rows are there, the others need "
        f"{need / 1e9:.2f} GB of {free / 1e9:.2f} GB free"
    )
    if todo and need > free:
        return "fail", f"{detail}; free some, or name another folder in extract.store"
    return "ok", detail
