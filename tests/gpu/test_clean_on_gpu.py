"""On an NVIDIA GPU: a real orphan that holds memory is named, and ended only when the config says so."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from draftsmith import clean_gpus, hardware
from draftsmith.config import Config, parse
from draftsmith.errors import DraftsmithError
from draftsmith.gpus import nvml
from draftsmith.processes import run_mark, runtime_folder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

MIB = 1 << 20
HELD_MIB = 2048
HOLDER = f"""
import torch, time
held = torch.zeros({HELD_MIB} * 2**20, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("up", flush=True)
time.sleep(600)
"""
LEADER = """
import subprocess, sys
from draftsmith.processes import run_mark
run_mark.mark_run()
quiet = subprocess.DEVNULL
child = subprocess.Popen(
    [sys.executable, "-c", sys.argv[1]], stdin=quiet, stdout=subprocess.PIPE, stderr=quiet, start_new_session=True
)
child.stdout.readline()
print(child.pid, flush=True)
"""


def used() -> int:
    """Bytes in use on the GPU."""
    hardware.gpus.cache_clear()
    return hardware.gpus()[0].used


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The first of the granted GPUs, without another run's mark or lease."""
    first = hardware.gpus()[0]
    for name in (run_mark.MARK, run_mark.WORKFLOW, "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", first.visible)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setenv(runtime_folder.VARIABLE, str(tmp_path / "runtime"))
    hardware.gpus.cache_clear()
    yield
    hardware.gpus.cache_clear()


@pytest.fixture
def orphan(one_gpu: None) -> Iterator[int]:
    """A process with 2 GiB on the GPU, which carries the mark of a run that is gone."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DRAFTSMITH_")}
    started = subprocess.run(
        [sys.executable, "-c", LEADER, HOLDER], capture_output=True, text=True, check=True, timeout=120, env=clean
    )
    pid = int(started.stdout)
    yield pid
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def config(**clean: object) -> Config:
    return parse({"clean": clean}, "test")


def test_an_orphan_that_holds_memory(orphan: int, capfd: pytest.CaptureFixture[str]) -> None:
    """First named and left alone; then ended, and the memory is back.

    Where a container keeps the driver's process numbers to itself, the orphan is known by its mark alone.
    """
    before = used()
    assert before >= HELD_MIB * MIB
    # What this test's own process and others hold beside it.
    rest = (before - HELD_MIB * MIB) // MIB + 1
    (device,) = nvml.devices()
    seen = orphan in [pid for pid, _ in nvml.processes(device) or []]
    with pytest.raises(DraftsmithError) as told:
        clean_gpus.check(config(max_used_mib=rest))
    assert f"process {orphan} of" in str(told.value)
    assert "an orphan of this workflow" in str(told.value)
    assert "clean.kill_orphans: true" in str(told.value)
    assert (f"GPU {device.index}: process {orphan}" in str(told.value)) is seen
    assert psutil.Process(orphan).status() != psutil.STATUS_ZOMBIE, "it was only named"
    assert used() >= HELD_MIB * MIB

    capfd.readouterr()
    ended = clean_gpus.check(config(kill_orphans=True, max_used_mib=rest))
    assert [holder.pid for holder in ended] == [orphan]
    assert not psutil.pid_exists(orphan) or psutil.Process(orphan).status() == psutil.STATUS_ZOMBIE
    assert before - used() >= HELD_MIB * MIB
    said = capfd.readouterr().err
    assert f"process {orphan} of" in said
    assert f"clean: GPU {device.index} has " in said
    # A GPU that is free again is no news.
    assert clean_gpus.check(config(max_used_mib=rest)) == []


def test_a_process_that_is_not_this_workflows_is_left_alone(one_gpu: None) -> None:
    """Of the same user and with as much memory, but without a mark."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DRAFTSMITH_")}
    shell = (
        f"{sys.executable} -c '{HOLDER.replace(chr(39), chr(34))}' >/tmp/draftsmith-holder-{os.getpid()} 2>&1 & echo $!"
    )
    pid = int(subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True, env=clean).stdout)
    said = Path(f"/tmp/draftsmith-holder-{os.getpid()}")
    try:
        deadline = time.monotonic() + 120
        while said.read_text() != "up\n":
            assert psutil.pid_exists(pid), said.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        with pytest.raises(DraftsmithError, match=r"in use|by no process that can be seen from here"):
            clean_gpus.check(config(kill_orphans=True))
        assert psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    finally:
        os.kill(pid, signal.SIGKILL)
        said.unlink()
