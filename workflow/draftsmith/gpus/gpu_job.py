"""The start of every job on GPUs: which of them are its own, whether they are enough, and that nothing is on them."""

from __future__ import annotations

import os

from draftsmith import clean_gpus, engine, hardware
from draftsmith.config import Config
from draftsmith.gpus import gpu_lease, nvml
from draftsmith.processes import run_mark


def number(config: Config, granted: int | None, wanted: int) -> None:
    """Decide which of the visible GPUs this job uses: ``granted`` by the scheduler, ``wanted`` when nobody was asked."""
    run_mark.mark_run()
    if config.engine.device == "cpu" or not hardware.gpus():
        return
    # So that a number means the same GPU to CUDA and to NVIDIA's library; set before CUDA starts.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if "CUDA_VISIBLE_DEVICES" not in os.environ and nvml.granted() is not None:
        # Slurm's own variables, which CUDA does not read.
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.visible for gpu in hardware.gpus())
    count = min(wanted if granted is None else granted, len(hardware.gpus()))
    gpu_lease.take(count, config.clean.wait_minutes, config.clean.max_used_mib)


def begin(config: Config, granted: int | None) -> None:
    """A stage that runs the engine: as many GPUs as tensor parallelism needs, this job's alone, and free.

    Raises :class:`DraftsmithError` when there are too few, when other jobs keep them, or when something holds them.
    """
    engine.check_granted(config, granted)
    number(config, granted, config.engine.tp)
    clean_gpus.check(config)


def begin_training(config: Config, granted: int | None) -> None:
    """A stage that uses every GPU it was granted, however many these are."""
    if granted == 0 and hardware.gpus():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        hardware.gpus.cache_clear()
    number(config, granted, len(hardware.gpus()))
    clean_gpus.check(config)
