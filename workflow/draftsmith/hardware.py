"""What this machine has, and the choices that follow from it: device, precision, threads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Literal

from draftsmith.gpus import nvml

Device = Literal["cuda", "cpu"]


@dataclass(frozen=True)
class Gpu:
    """One GPU or MIG device that this process may use; memory in bytes, ``visible`` its name in CUDA_VISIBLE_DEVICES."""

    index: str
    name: str
    total: int
    used: int
    uuid: str = ""
    visible: str = ""


def cores() -> list[int]:
    """Ids of the CPU cores that this process may run on."""
    return sorted(os.sched_getaffinity(0))


@cache
def gpus() -> tuple[Gpu, ...]:
    """The GPUs that this process may use, in CUDA's order; empty without an NVIDIA driver. Touches no CUDA context.

    Raises :class:`DraftsmithError` when a driver is there and does not answer.
    """
    try:
        return tuple(
            Gpu(device.index, nvml.name(device), *nvml.memory(device), device.uuid, device.visible)
            for device in nvml.devices()
        )
    except nvml.NoDriver:
        return ()


def why_no_gpu() -> str:
    """What is in the way of a GPU, for a person; '' when there is one."""
    if gpus():
        return ""
    try:
        return "none was granted" if nvml.granted() == [] else "no GPU is there" if not nvml.devices() else ""
    except nvml.NoDriver as reason:
        return str(reason)


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
