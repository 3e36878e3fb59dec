"""Checks of the machine: GPUs, memory for the weights, room in the store."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import psutil

from draftsmith import engine, hardware, store
from draftsmith.errors import DraftsmithError
from draftsmith.extract_shard.plan import missing, stored_rows
from draftsmith.files import check_writable
from draftsmith.preflight.subject import Subject, needed
from draftsmith.target_weights import loaded_bytes
from draftsmith.verdict import Found

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
    """The checkpoint's weights have room: on a CPU in main memory, on GPUs in each one's share."""
    args = subject.config.engine.args
    weights = loaded_bytes(subject.folder, subject.dtype)
    # vLLM's own quantisation makes them smaller by what only it knows.
    status, before = ("warn", ", before engine.args.quantization") if args.get("quantization") else ("fail", "")
    if subject.on_cpu:
        # Each rank holds its part of the weights, and a KV cache of its own.
        cache = subject.config.engine.kv_cache_gib * subject.config.engine.tp
        total, free = psutil.virtual_memory().total / GIB, psutil.virtual_memory().available / GIB
        detail = f"{weights / GIB:.1f} GiB of weights{before} and {cache:g} GiB of KV cache; {free:.1f} of {total:.1f} GiB are free"
        if weights / GIB > total:
            return status, f"{detail}; take a smaller target"  # type: ignore[return-value]
        return ("warn", f"{detail}; lower engine.kv_cache_gib or end other programs") if weights / GIB + cache > free else ("ok", detail)
    engine.check_granted(subject.config, subject.granted)
    tp, share = subject.config.engine.tp, subject.config.engine.gpu_memory_utilization
    smallest = min(gpu.total for gpu in hardware.gpus()[:tp]) / GIB
    room = smallest * share + float(args.get("cpu_offload_gb", 0))
    detail = f"{weights / GIB:.1f} GiB of weights{before}, {weights / tp / GIB:.1f} on each of {tp} GPUs that may fill {smallest * share:.1f} GiB"
    if weights / tp / GIB >= room:
        return status, f"{detail}; raise engine.tp, or engine.gpu_memory_utilization ({share})"  # type: ignore[return-value]
    return "ok", f"{detail}: {room - weights / tp / GIB:.1f} are left for the KV cache and the step"


def store_room(subject: Subject) -> Found:
    """The store can be written, and what it lacks fits on its disk."""
    config, target = subject.config, subject.target
    root = Path(config.extract.store)
    check_writable(root, "extract.store")
    layers = needed(lambda: subject.layers, "layers")
    storage = config.extract.storage
    key = store.fingerprint(target["fingerprint"], layers, subject.dtype, config.engine.args, storage)
    index = store.scan(root / key, key)
    rows = set(stored_rows(subject.rows, config.extract.supervised_only).values())
    todo = missing(list(rows), index.rows)
    per_token = store.bytes_per_token(len(layers), target["hidden_size"], subject.dtype, storage)
    need, free = sum(row.length for row in todo) * per_token, shutil.disk_usage(root).free
    detail = (
        f"{root / key}: {len(rows) - len(todo)} of {len(rows)} rows are there, the others need "
        f"{need / 1e9:.2f} GB of {free / 1e9:.0f} GB free"
    )
    if need * 1.05 > free:
        return "fail", f"{detail}; free some, or name another folder in extract.store"
    return "ok", detail
