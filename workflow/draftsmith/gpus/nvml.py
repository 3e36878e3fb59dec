"""NVIDIA's management library: the GPUs that were granted, who is on them, and each of its errors in one sentence.

Whole GPUs and MIG devices are both a :class:`Device`; of a GPU in MIG mode nothing is asked but which devices it has, as
the library refuses most questions about it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from draftsmith.errors import DraftsmithError

# What stands for 'none' in CUDA_VISIBLE_DEVICES: CUDA stops reading at the first that it does not know.
_NONE = {"", "-1", "nodevfiles", "none", "void"}

_MENDS = {
    "LibRmVersionMismatch": (
        "the NVIDIA driver was updated but the one loaded is older: reboot the machine, reload its kernel modules, or start "
        "the container anew"
    ),
    "NoPermission": "this job may not ask NVIDIA's driver about its GPUs: have the device files and the library given to it",
    "GpuIsLost": "a GPU has fallen off the bus: `dmesg` says why, and only a reboot brings it back",
    "ResetRequired": "a GPU has to be reset by whoever runs the machine: `dmesg` says why",
    "FunctionNotFound": "the NVIDIA driver is too old: install a newer one",
}  # fmt: skip
_ELSE = "`nvidia-smi` and `dmesg` tell more"


class NoDriver(Exception):
    """There is no NVIDIA driver here; the text says how that shows."""


@dataclass(frozen=True)
class Device:
    """A GPU or a MIG device: ``index`` as nvidia-smi numbers it (``0``, or ``0:1`` for MIG), ``instances`` (GPU, compute) of MIG."""

    handle: Any
    index: str
    uuid: str
    parent: Any = None
    instances: tuple[int, int] | None = None

    @property
    def visible(self) -> str:
        """Its name in CUDA_VISIBLE_DEVICES."""
        return self.index if self.instances is None else self.uuid


@contextmanager
def told() -> Iterator[Any]:
    """Gives the library, made ready; turns its errors into :class:`NoDriver` or a :class:`DraftsmithError` of one sentence."""
    import pynvml

    try:
        pynvml.nvmlInit()
        yield pynvml
    except pynvml.NVMLError as error:
        kind = type(error).__name__.removeprefix("NVMLError_")
        if kind == "LibraryNotFound":
            raise NoDriver("NVIDIA's library libnvidia-ml.so.1 is not there") from None
        if kind == "DriverNotLoaded":
            raise NoDriver("NVIDIA's driver is not loaded") from None
        raise DraftsmithError(
            f"NVIDIA's driver answers '{error}': {_MENDS.get(kind, _ELSE)}; engine.device: cpu goes on without GPUs"
        ) from None


def granted() -> list[str] | None:
    """GPUs that this job was given, as the environment writes them; None when it says nothing, so all may be used.

    CUDA_VISIBLE_DEVICES comes first, as it also decides what CUDA shows; without it Slurm's own variables count.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names: list[str] = []
        for name in (part.strip() for part in visible.split(",")):
            if name.lower() in _NONE:
                break
            names.append(name)
        return names
    for variable in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        if os.environ.get(variable):
            return _spelt_out(os.environ[variable])
    return None


def _spelt_out(text: str) -> list[str]:
    """Numbers of a list such as ``0,2-3``."""
    names: list[str] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        names += [str(number) for number in range(int(first), int(last) + 1)] if dash else [first]
    return names


def devices() -> list[Device]:
    """The granted devices, in the order in which CUDA numbers them.

    Raises :class:`NoDriver` without a driver, and :class:`DraftsmithError` for a name that no device here has.
    """
    names = granted()
    if names == []:
        return []
    with told() as nvml:
        every = [_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
        if names is None or ("CUDA_VISIBLE_DEVICES" not in os.environ and len(names) == len(every)):
            # Where Slurm hides other jobs' GPUs, those that are left are numbered anew.
            found = [device for gpu in every for device in _usable(nvml, gpu)]
        else:
            found = [_named(nvml, every, name) for name in names]
    return list({device.uuid: device for device in found}.values())


def others(mine: list[Device]) -> list[Device]:
    """Whole GPUs of this machine that were not granted, not even in part."""
    uuids = {device.uuid for device in mine}
    with told() as nvml:
        every = [_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
        parts = {device.index.partition(":")[0] for device in mine if device.instances is not None}
        return [gpu for gpu in every if gpu.uuid not in uuids and gpu.index not in parts]


def name(device: Device) -> str:
    """The product's name."""
    with told() as nvml:
        return str(nvml.nvmlDeviceGetName(device.handle))


def memory(device: Device) -> tuple[int, int]:
    """Bytes in all and bytes in use; of a MIG device its own, not its GPU's."""
    with told() as nvml:
        found = nvml.nvmlDeviceGetMemoryInfo(device.handle)
        return int(found.total), int(found.used)


def processes(device: Device) -> list[tuple[int, int]] | None:
    """Process numbers on the device and the bytes that each holds there (0 when that is not told); None where all is hidden."""
    with told() as nvml:
        hidden = (nvml.NVMLError_NotSupported, nvml.NVMLError_NoPermission)
        try:
            found = nvml.nvmlDeviceGetComputeRunningProcesses(device.handle)
        except hidden:
            if device.instances is None:
                return None
            try:
                every = nvml.nvmlDeviceGetComputeRunningProcesses(device.parent)
            except hidden:
                return None
            found = [one for one in every if (one.gpuInstanceId, one.computeInstanceId) == device.instances]
        return [(int(one.pid), int(one.usedGpuMemory or 0)) for one in found]


def _gpu(nvml: Any, index: int) -> Device:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    return Device(handle, str(index), str(nvml.nvmlDeviceGetUUID(handle)))


def _parts(nvml: Any, gpu: Device) -> list[Device] | None:
    """The MIG devices of a GPU; None for one that is not divided."""
    try:
        divided = nvml.nvmlDeviceGetMigMode(gpu.handle)[0] == 1
    except nvml.NVMLError_NotSupported:
        return None
    if not divided:
        return None
    found = []
    for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu.handle)):
        try:
            handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu.handle, place)
        except nvml.NVMLError_NotFound:
            continue
        instances = (int(nvml.nvmlDeviceGetGpuInstanceId(handle)), int(nvml.nvmlDeviceGetComputeInstanceId(handle)))
        found.append(Device(handle, f"{gpu.index}:{place}", str(nvml.nvmlDeviceGetUUID(handle)), gpu.handle, instances))
    return found


def _usable(nvml: Any, gpu: Device) -> list[Device]:
    """What CUDA shows of a GPU: itself, or the first of its MIG devices."""
    parts = _parts(nvml, gpu)
    return [gpu] if parts is None else parts[:1]


def _named(nvml: Any, every: list[Device], given: str) -> Device:
    """The device that CUDA takes for ``given``: a number, a UUID or its beginning, or a MIG device's name, new or old."""
    if given.isdigit():
        found = [gpu for gpu in every if gpu.index == given]
    elif given.startswith("MIG-GPU-"):
        # Drivers before 470: MIG-GPU-UUID/GPU instance/compute instance.
        uuid, *numbers = given.removeprefix("MIG-").split("/")
        pairs = [(gpu, part) for gpu in every for part in _parts(nvml, gpu) or []]
        found = [part for gpu, part in pairs if gpu.uuid == uuid and [str(n) for n in part.instances or ()] == numbers]
    elif given.startswith("MIG-"):
        found = [part for gpu in every for part in _parts(nvml, gpu) or [] if part.uuid.startswith(given)]
    else:
        found = [gpu for gpu in every if gpu.uuid.startswith(given)]
    if len(found) != 1:
        variable = "CUDA_VISIBLE_DEVICES" if "CUDA_VISIBLE_DEVICES" in os.environ else "SLURM_JOB_GPUS"
        known = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in every) or "none"
        raise DraftsmithError(
            f"{variable} names {given}, which is {'no device' if not found else 'more than one device'} here; correct it, "
            f"the GPUs that are here: {known}"
        )
    usable = _usable(nvml, found[0]) if found[0].instances is None else found
    if not usable:
        raise DraftsmithError(
            f"GPU {given} is in MIG mode and has no MIG device; make one with `nvidia-smi mig -cgi … -C`, or ask for another GPU"
        )
    return usable[0]
