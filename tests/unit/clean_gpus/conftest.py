"""A machine with two stand-in GPUs, on which only the processes of a test are seen."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from cast_of_processes import Cast

from draftsmith import clean_gpus, hardware
from draftsmith.clean_gpus import holders, leftovers
from draftsmith.processes import run_mark, scratch
from draftsmith.processes.runtime_folder import VARIABLE
from fake_nvml import Nvml, h200s


@pytest.fixture
def cast(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cast]:
    """Processes of a test; a cleaning sees these and its own, and none of the machine's others."""
    made = Cast()

    def seen() -> Iterator[psutil.Process]:
        for pid in [os.getpid(), *made.pids]:
            with contextlib.suppress(psutil.NoSuchProcess):
                yield psutil.Process(pid)

    for module in (holders, leftovers):
        monkeypatch.setattr(module.psutil, "process_iter", seen)
    yield made
    made.end()


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cast: Cast) -> Iterator[Nvml]:
    """Two GPUs, of which GPU 0 is granted; short waits, and folders of the test's own."""
    fake = Nvml(h200s(2))
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    for name in (run_mark.MARK, run_mark.WORKFLOW, "SLURM_JOB_ID", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "runtime"))
    monkeypatch.setattr(scratch, "roots", lambda: [tmp_path])
    monkeypatch.setattr(holders, "in_container", lambda: False)
    monkeypatch.setattr(clean_gpus, "in_container", lambda: False)
    monkeypatch.setattr(clean_gpus, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(clean_gpus, "FREE_SECONDS", 0.2)
    hardware.gpus.cache_clear()
    yield fake
    hardware.gpus.cache_clear()
