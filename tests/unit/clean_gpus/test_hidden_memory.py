"""Memory that no visible process holds: the driver's own delay, containers, a driver that tells nothing."""

from __future__ import annotations

import threading
import time

import pynvml
import pytest
from cast_of_processes import Cast, gone

from draftsmith import clean_gpus
from draftsmith.clean_gpus import holders
from draftsmith.config import Config, parse
from draftsmith.errors import DraftsmithError
from fake_nvml import GIB, Nvml


def config(**clean: object) -> Config:
    return parse({"clean": clean}, "test")


def test_memory_that_nobody_holds_is_told_with_its_amount_and_the_mend(nvml: Nvml) -> None:
    nvml.gpus[0].base = 70 * GIB
    with pytest.raises(
        DraftsmithError,
        match=r"by no process that can be seen from here: GPU 0 71680 MiB; look with `nvidia-smi` .*, ask for other GPUs, "
        r"or raise clean\.max_used_mib \(1024\)$",
    ) as told:
        clean_gpus.check(config())
    assert "\n" not in str(told.value)
    assert clean_gpus.check(config(max_used_mib=71680)) == []


def test_the_driver_has_a_while_to_give_memory_back(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clean_gpus, "FREE_SECONDS", 20.0)
    nvml.gpus[0].base = 70 * GIB
    timer = threading.Timer(0.5, lambda: setattr(nvml.gpus[0], "base", 0))
    timer.start()
    begun = time.monotonic()
    assert clean_gpus.check(config()) == []
    assert 0.4 < time.monotonic() - begun < 10


def test_memory_that_does_not_come_back_after_an_end(nvml: Nvml, cast: Cast) -> None:
    orphan = cast.orphan()
    nvml.gpus[0].pids[orphan], nvml.gpus[0].base = GIB, 70 * GIB
    with pytest.raises(DraftsmithError, match=rf"even after process {orphan} was ended: GPU 0 71680 MiB"):
        clean_gpus.check(config(kill_orphans=True))
    assert gone(orphan)


@pytest.mark.parametrize("hidden", ["no process", "a number of the host"])
def test_in_a_container_the_host_has_to_be_asked(nvml: Nvml, monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    """NVIDIA's library names no process there, or one by a number that nobody has here."""
    monkeypatch.setattr(clean_gpus, "in_container", lambda: True)
    if hidden == "no process":
        nvml.gpus[0].base = 2 * GIB
    else:
        nvml.gpus[0].base, nvml.gpus[0].ghosts = 0, {4194300: 2 * GIB}
    with pytest.raises(
        DraftsmithError,
        match=r"GPU 0 2048 MiB; this job runs in a container, .*`nvidia-smi` on the host and end them there",
    ):
        clean_gpus.check(config())


def test_orphans_are_the_likeliest_where_the_driver_does_not_say_who_it_is(nvml: Nvml, cast: Cast) -> None:
    """Known by their mark, whatever NVIDIA's library shows in a container."""
    orphan = cast.orphan()
    nvml.gpus[0].unseen[orphan] = 2 * GIB
    with pytest.raises(
        DraftsmithError,
        match=rf"GPU 0 2052 MiB; an earlier run left these, set clean\.kill_orphans: true: process {orphan} of",
    ):
        clean_gpus.check(config())
    assert not gone(orphan)
    assert [holder.pid for holder in clean_gpus.check(config(kill_orphans=True))] == [orphan]
    assert gone(orphan)


def test_a_number_of_the_host_is_not_taken_for_a_process_that_has_it_here(
    nvml: Nvml, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An orphan of this workflow that has no NVIDIA device open cannot be on a GPU: it is not ended for what another does."""
    monkeypatch.setattr(holders, "in_container", lambda: True)
    orphan = cast.orphan()
    nvml.gpus[0].ghosts = {orphan: GIB // 2}
    assert holders.describe("0", orphan, GIB).owner == "hidden"
    assert clean_gpus.check(config()) == [], "half a GiB counts as free"
    nvml.gpus[0].ghosts = {orphan: 2 * GIB}
    with pytest.raises(DraftsmithError, match="by no process that can be seen from here"):
        clean_gpus.check(config())
    assert not gone(orphan)


@pytest.mark.parametrize("error", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION])
def test_a_driver_that_names_no_process_is_asked_for_memory(nvml: Nvml, error: int) -> None:
    nvml.gpus[0].refuses = error
    assert clean_gpus.check(config()) == []
    nvml.gpus[0].base = 2 * GIB
    with pytest.raises(DraftsmithError, match=r"GPU 0 2048 MiB; the driver names no process to this user"):
        clean_gpus.check(config())
