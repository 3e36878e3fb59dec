"""A stand-in for NVIDIA's library: the calls of nvidia-ml-py that the workflow uses, with its own error classes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml

GIB = 1 << 30


@dataclass(eq=False)
class Gpu:
    """A GPU or, within ``parts``, a MIG device.

    ``pids`` are real processes and their bytes, gone when they are; ``unseen`` are such that the library does not name, as
    in a container; ``ghosts`` are numbers that mean nothing here; ``base`` bytes are held by nobody. ``refuses`` is the
    error that NVML answers when asked for processes.
    """

    uuid: str
    pids: dict[int, int] = field(default_factory=dict)
    ghosts: dict[int, int] = field(default_factory=dict)
    unseen: dict[int, int] = field(default_factory=dict)
    base: int = 4 << 20
    total: int = 141 * GIB
    refuses: int | None = None
    parts: list[Gpu] | None = None
    instances: tuple[int, int] = (0, 0)

    def running(self) -> list[tuple[int, int, tuple[int, int]]]:
        """Number, bytes and instances of each process; a divided GPU's are those of its parts."""
        if self.parts is not None:
            return [one for part in self.parts for one in part.running()]
        real = {pid: size for pid, size in self.pids.items() if _alive(pid)}
        return [(pid, size, self.instances) for pid, size in (real | self.ghosts).items()]

    def held(self) -> int:
        """Bytes in use."""
        unseen = sum(size for pid, size in self.unseen.items() if _alive(pid))
        return self.base + unseen + sum(size for _, size, _ in self.running())


class Nvml:
    """The module, to be put into sys.modules; ``error`` is what it answers from the start."""

    def __init__(self, gpus: Sequence[Gpu] = (), error: int | None = None) -> None:
        self.gpus, self.error = list(gpus), error
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        # Error classes and numbers are the real ones; a call that is not here is a fault of the test.
        if not name.startswith("NVML"):
            raise AttributeError(name)
        return getattr(pynvml, name)

    def nvmlInit(self) -> None:
        if self.error is not None:
            raise pynvml.NVMLError(self.error)

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, gpu: Gpu) -> str:
        return gpu.uuid

    def nvmlDeviceGetName(self, gpu: Gpu) -> str:
        return "NVIDIA H200 MIG 1g.18gb" if gpu.instances != (0, 0) else "NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu) -> Any:
        self.asked.append(f"memory {gpu.uuid}")
        return SimpleNamespace(total=gpu.total, used=gpu.held())

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: Gpu) -> list[Any]:
        self.asked.append(f"processes {gpu.uuid}")
        if gpu.refuses is not None:
            raise pynvml.NVMLError(gpu.refuses)
        return [
            SimpleNamespace(pid=pid, usedGpuMemory=size or None, gpuInstanceId=part[0], computeInstanceId=part[1])
            for pid, size, part in gpu.running()
        ]

    def nvmlDeviceGetMigMode(self, gpu: Gpu) -> list[int]:
        mode = int(gpu.parts is not None)
        return [mode, mode]

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: Gpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: Gpu, index: int) -> Gpu:
        if gpu.parts is None or index >= len(gpu.parts):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return gpu.parts[index]

    def nvmlDeviceGetGpuInstanceId(self, gpu: Gpu) -> int:
        return gpu.instances[0]

    def nvmlDeviceGetComputeInstanceId(self, gpu: Gpu) -> int:
        return gpu.instances[1]


def h200s(count: int) -> list[Gpu]:
    """Free GPUs; each UUID begins with its number, eight times."""
    return [Gpu(f"GPU-{str(index) * 8}-aaaa-bbbb-cccc-dddddddddddd") for index in range(count)]


def install(nvml: Nvml) -> None:
    """For a process of its own: what imports pynvml from now on gets ``nvml``."""
    sys.modules["pynvml"] = nvml  # type: ignore[assignment]


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
