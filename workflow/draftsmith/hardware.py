"""What this machine has, and the choices that follow from it: device, precision, threads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Literal

Device = Literal["cuda", "cpu"]


@dataclass(frozen=True)
class Gpu:
    """One GPU that this process may use, as NVML tells it; memory in bytes."""

    index: str
    name: str
    total: int
    used: int


def cores() -> list[int]:
    """Ids of the CPU cores that this process may run on."""
    return sorted(os.sched_getaffinity(0))


def granted_gpus() -> list[str] | None:
    """GPUs that CUDA_VISIBLE_DEVICES names, as written there; None when it is not set."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if visible is None else [gpu.strip() for gpu in visible.split(",") if gpu.strip()]


@cache
def gpus() -> tuple[Gpu, ...]:
    """The GPUs that this process may use; empty without an NVIDIA driver. Touches no CUDA context."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    granted = granted_gpus()
    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        if granted is not None and not {str(index), str(pynvml.nvmlDeviceGetUUID(handle))} & set(granted):
            continue
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        found.append(Gpu(str(index), str(pynvml.nvmlDeviceGetName(handle)), int(memory.total), int(memory.used)))
    return tuple(found)


def device() -> Device:
    """Where models run: on the GPUs where there are any."""
    return "cuda" if gpus() else "cpu"


def torch_device() -> str:
    """The device of a process's tensors; torchrun's LOCAL_RANK picks one of several GPUs."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device() == "cuda" else "cpu"


def target_dtype(asked: str, checkpoint: str | None) -> str:
    """Precision of the target: as asked; 'auto' is the checkpoint's on a GPU and float32 on a CPU.

    On CPUs without bfloat16 instructions vLLM's bfloat16 is about five times slower than its float32.
    """
    if asked != "auto":
        return asked
    return "float32" if device() == "cpu" else (checkpoint or "bfloat16")


def thread_binding() -> str:
    """Value of VLLM_CPU_OMP_THREADS_BIND that uses every core; by default vLLM leaves one idle (240 against 440 tokens/s on two)."""
    return ",".join(str(core) for core in cores())
