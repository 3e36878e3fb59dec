"""Which GPUs are granted, what is asked about them, and each of the library's errors in one sentence."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pynvml
import pytest

from draftsmith import engine, hardware
from draftsmith.config import parse
from draftsmith.errors import DraftsmithError
from draftsmith.gpus import nvml
from fake_nvml import GIB, Gpu, Nvml, h200s

Use = Callable[[Nvml], Nvml]
MIG = "MIG-11111111-aaaa-bbbb-cccc-dddddddddddd"
OTHER_MIG = "MIG-22222222-aaaa-bbbb-cccc-dddddddddddd"


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Use]:
    """Puts a stand-in in the library's place, in an environment that grants nothing in particular."""
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)

    def put(fake: Nvml) -> Nvml:
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        hardware.gpus.cache_clear()
        return fake

    yield put
    hardware.gpus.cache_clear()


def divided() -> Nvml:
    """GPU 0 whole, GPU 1 in two MIG devices of 18 GiB."""
    parts = [
        Gpu(MIG, total=18 * GIB, base=1 << 20, instances=(7, 0)),
        Gpu(OTHER_MIG, total=18 * GIB, base=5 * GIB, instances=(9, 0)),
    ]
    return Nvml([h200s(1)[0], Gpu("GPU-11111111-aaaa-bbbb-cccc-dddddddddddd", base=9 * GIB, parts=parts)])


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["0", "1", "2", "3"]),
        ("2", ["2"]),
        (" 3 , 1 ", ["3", "1"]),
        ("1,1", ["1"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("2,-1,0", ["2"]),
        ("GPU-33333333-aaaa-bbbb-cccc-dddddddddddd,0", ["3", "0"]),
        ("GPU-2222", ["2"]),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(
    use: Use, monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: list[str]
) -> None:
    use(Nvml(h200s(4)))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.index for gpu in hardware.gpus()] == expected


@pytest.mark.parametrize(
    ("count", "variables", "expected"),
    [
        (8, {"SLURM_JOB_GPUS": "2,5"}, ["2", "5"]),
        (8, {"SLURM_JOB_GPUS": "4-7"}, ["4", "5", "6", "7"]),
        # The step's part of the job's.
        (8, {"SLURM_JOB_GPUS": "2,5", "SLURM_STEP_GPUS": "5"}, ["5"]),
        # A cluster that hides other jobs' GPUs numbers those that are left from 0 on.
        (2, {"SLURM_JOB_GPUS": "2,5"}, ["0", "1"]),
        # What CUDA itself is told comes first.
        (8, {"SLURM_JOB_GPUS": "2,5", "CUDA_VISIBLE_DEVICES": "0"}, ["0"]),
    ],
)
def test_slurm_names_the_gpus_of_a_job(
    use: Use, monkeypatch: pytest.MonkeyPatch, count: int, variables: dict[str, str], expected: list[str]
) -> None:
    use(Nvml(h200s(count)))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert [gpu.index for gpu in hardware.gpus()] == expected


@pytest.mark.parametrize(
    ("visible", "fault"),
    [
        ("7", "no device here"),
        ("GPU-9", "no device here"),
        ("GPU-", "more than one device here"),
        (MIG, "no device here"),
    ],
)
def test_a_name_that_no_gpu_has(use: Use, monkeypatch: pytest.MonkeyPatch, visible: str, fault: str) -> None:
    """CUDA would pass over it in silence, and all that come after it."""
    use(Nvml(h200s(2)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(
        DraftsmithError, match=rf"CUDA_VISIBLE_DEVICES names {visible}, which is {fault}.*: 0 \(GPU-0000"
    ) as told:
        hardware.gpus()
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("visible", [MIG, "MIG-GPU-11111111-aaaa-bbbb-cccc-dddddddddddd/7/0", "1"])
def test_a_mig_device_has_memory_and_processes_of_its_own(
    use: Use, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    """By its name, by its name of old drivers, and as the first of its GPU, which CUDA takes for the GPU's number."""
    fake = use(divided())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (gpu,) = hardware.gpus()
    assert (gpu.index, gpu.uuid, gpu.visible) == ("1:0", MIG, MIG)
    assert (gpu.total, gpu.used) == (18 * GIB, 1 << 20)
    (device,) = nvml.devices()
    nvml.processes(device)
    assert not [call for call in fake.asked if "GPU-" in call], "the whole GPU is asked for nothing"


def test_processes_of_a_mig_device_that_only_its_gpu_tells(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(divided())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", MIG)
    first, second = fake.gpus[1].parts or []
    first.refuses, first.ghosts, second.ghosts = pynvml.NVML_ERROR_NOT_SUPPORTED, {41: 5}, {42: 6}
    (device,) = nvml.devices()
    assert nvml.processes(device) == [(41, 5)]
    fake.gpus[1].refuses = pynvml.NVML_ERROR_NO_PERMISSION
    assert nvml.processes(device) is None


def test_a_divided_gpu_without_a_part(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    use(Nvml([Gpu("GPU-0", parts=[])]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(DraftsmithError, match=r"GPU 0 is in MIG mode and has no MIG device; make one with"):
        hardware.gpus()


def test_all_that_is_not_granted(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    use(Nvml(h200s(4)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    assert [device.index for device in nvml.others(nvml.devices())] == ["0", "3"]
    use(divided())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", MIG)
    assert [device.index for device in nvml.others(nvml.devices())] == ["0"], "not the GPU that it is a part of"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "NVIDIA's library libnvidia-ml.so.1 is not there"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "NVIDIA's driver is not loaded"),
    ],
)
def test_a_machine_without_a_driver_is_one_without_gpus(use: Use, error: int, reason: str) -> None:
    use(Nvml(error=error))
    assert hardware.gpus() == ()
    assert hardware.device() == "cpu"
    assert hardware.why_no_gpu() == reason
    with pytest.raises(
        DraftsmithError, match=rf"engine\.device is cuda, but this job sees no GPU \({reason}\); ask the"
    ):
        engine.check_granted(parse({"engine": {"device": "cuda"}}, "test"), None)


@pytest.mark.parametrize(
    ("error", "mend"),
    [
        (
            pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
            "'RM has .*mismatch.': the NVIDIA driver was updated but .*reboot the machine",
        ),
        (pynvml.NVML_ERROR_NO_PERMISSION, "'Insufficient Permissions': this job may not ask"),
        (pynvml.NVML_ERROR_GPU_IS_LOST, "'GPU is lost': a GPU has fallen off the bus"),
        (pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, "'Function Not Found': the NVIDIA driver is too old"),
        (pynvml.NVML_ERROR_UNKNOWN, "'Unknown Error': `nvidia-smi` and `dmesg` tell more"),
    ],
)
def test_a_driver_that_does_not_answer_is_told_in_one_sentence(use: Use, error: int, mend: str) -> None:
    """And is not taken for a machine without GPUs, on which the run would go on a hundred times slower."""
    use(Nvml(error=error))
    with pytest.raises(
        DraftsmithError, match=rf"NVIDIA's driver answers {mend}.*; engine\.device: cpu goes on"
    ) as told:
        hardware.gpus()
    assert "\n" not in str(told.value)


def test_where_none_is_granted_the_driver_is_not_even_asked(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    use(Nvml(error=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert hardware.gpus() == ()
    assert hardware.why_no_gpu() == "none was granted"
