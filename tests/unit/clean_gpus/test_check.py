"""Who may be ended, and who is only named: real processes on stand-in GPUs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path

import psutil
import pynvml
import pytest
from cast_of_processes import STUBBORN, Cast, gone

from draftsmith import clean_gpus, hardware
from draftsmith.clean_gpus import ending, holders
from draftsmith.config import Config, parse
from draftsmith.errors import DraftsmithError
from draftsmith.processes import run_mark
from fake_nvml import GIB, Gpu, Nvml


def config(**clean: object) -> Config:
    return parse({"clean": clean}, "test")


def test_an_orphan_is_named_and_left_alone_by_default(nvml: Nvml, cast: Cast) -> None:
    orphan = cast.orphan()
    nvml.gpus[0].pids[orphan] = 2 * GIB
    mark = rf"run \d+-\d+-{run_mark.here()}"
    with pytest.raises(
        DraftsmithError,
        match=rf"clean\.kill_orphans: true: GPU 0: process {orphan} of \w+ \(an orphan of this workflow, 2048 MiB, {mark}\): ",
    ) as told:
        clean_gpus.check(config())
    assert "\n" not in str(told.value)
    assert not gone(orphan)


def test_an_orphan_is_ended_when_the_config_says_so_and_its_memory_is_back(
    nvml: Nvml, cast: Cast, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    orphan = cast.orphan()
    nvml.gpus[0].pids[orphan] = 2 * GIB
    clean_gpus.run(config(kill_orphans=True), report=tmp_path / "clean.json")
    assert gone(orphan)
    said = capfd.readouterr().err
    assert f"clean: ending GPU 0: process {orphan} of" in said
    assert "clean: GPU 0 has 2048 MiB back, 4 are in use" in said
    written = json.loads((tmp_path / "clean.json").read_text())
    assert [(holder["pid"], holder["owner"]) for holder in written["ended"]] == [(orphan, "orphan")]
    assert [(gpu["index"], gpu["used"]) for gpu in written["gpus"]] == [("0", 4 << 20)]


def test_only_the_granted_gpus_are_looked_at(nvml: Nvml, cast: Cast, capfd: pytest.CaptureFixture[str]) -> None:
    """An orphan and a stranger on GPU 1, which is not this job's: no word about them, and no signal."""
    orphan = cast.orphan()
    nvml.gpus[1].pids |= {orphan: 2 * GIB, cast.stranger(): GIB}
    assert clean_gpus.check(config(kill_orphans=True)) == []
    assert not gone(orphan)
    assert str(orphan) not in capfd.readouterr().err


def test_a_process_of_a_run_that_lives_is_named_with_its_job(nvml: Nvml, cast: Cast) -> None:
    child, leader = cast.alive(SLURM_JOB_ID="4711")
    nvml.gpus[0].pids[child] = GIB
    with pytest.raises(
        DraftsmithError,
        match=rf"in use.*GPU 0: process {child} of \w+ \(a job of yours that is alive, 1024 MiB, run {leader}-\d+-\w+, "
        rf"Slurm job 4711, started by process {leader}: .*from draftsmith.processes import run_mark",
    ):
        clean_gpus.check(config(kill_orphans=True))
    assert not gone(child)


def test_a_process_of_ones_own_that_is_not_this_workflows(nvml: Nvml, cast: Cast) -> None:
    stranger = cast.stranger()
    nvml.gpus[0].pids[stranger] = GIB
    with pytest.raises(
        DraftsmithError, match=rf"in use.*process {stranger} of \w+ \(yours, but not of this workflow, 1024 MiB\): "
    ):
        clean_gpus.check(config(kill_orphans=True))
    assert not gone(stranger)


@pytest.mark.parametrize("how", ["another user", "as psutil tells it"])
def test_another_users_process_is_named_and_left_alone(
    nvml: Nvml, cast: Cast, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Though it carries a mark whose run is gone."""
    ended = {run_mark.MARK: f"999999-1-{run_mark.here()}"}
    if how == "another user":
        if os.geteuid() != 0:
            pytest.skip("needs root to start another user's process")
        with subprocess.Popen(["sleep", "600"], user=65534, env=ended) as process:
            cast.pids.append(process.pid)
            nvml.gpus[0].pids[process.pid] = GIB
            with pytest.raises(DraftsmithError, match=rf"process {process.pid} of nobody \(another user's, 1024 MiB"):
                clean_gpus.check(config(kill_orphans=True))
            assert process.poll() is None
            process.kill()
        return
    pid = cast.orphan()
    nvml.gpus[0].pids[pid] = GIB
    uids = psutil.Process.uids
    monkeypatch.setattr(
        psutil.Process, "uids", lambda self: uids(self)._replace(real=12345) if self.pid == pid else uids(self)
    )
    with pytest.raises(DraftsmithError, match=rf"process {pid} of .*\(another user's, 1024 MiB"):
        clean_gpus.check(config(kill_orphans=True))
    assert not gone(pid)


def test_one_that_must_stay_keeps_the_orphans_beside_it(nvml: Nvml, cast: Cast) -> None:
    orphan = cast.orphan()
    nvml.gpus[0].pids |= {orphan: GIB, cast.stranger(): GIB}
    with pytest.raises(DraftsmithError, match="in use"):
        clean_gpus.check(config(kill_orphans=True))
    assert not gone(orphan)


def test_one_that_ignores_sigterm_is_killed(nvml: Nvml, cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "TERM_SECONDS", 0.5)
    orphan = cast.orphan(STUBBORN)
    nvml.gpus[0].pids[orphan] = GIB
    begun = time.monotonic()
    assert [holder.pid for holder in clean_gpus.check(config(kill_orphans=True))] == [orphan]
    assert time.monotonic() - begun >= 0.5, "it had its time"
    assert gone(orphan)


def test_a_stage_whose_snakemake_was_killed_is_an_orphan(nvml: Nvml, cast: Cast) -> None:
    """The stage itself is alive and computes for nobody; so do the processes that it has started."""
    child, leader = cast.alive(**{run_mark.WORKFLOW: f"999999-1-{run_mark.here()}"})
    nvml.gpus[0].pids |= {child: GIB}
    with pytest.raises(DraftsmithError, match=rf"an earlier run left.*process {child} of"):
        clean_gpus.check(config())
    clean_gpus.check(config(kill_orphans=True))
    assert gone(child)
    assert gone(leader)


def test_what_was_started_on_another_host_or_in_another_container_is_no_orphan(nvml: Nvml, cast: Cast) -> None:
    """The number in its mark means nothing here, so that its run may well be alive."""
    pid = cast.stranger(**{run_mark.MARK: "999999-1-01234567"})
    nvml.gpus[0].pids[pid] = GIB
    with pytest.raises(
        DraftsmithError, match=rf"in use.*process {pid} .*alive.*started on another host or in another container"
    ):
        clean_gpus.check(config(kill_orphans=True))
    assert not gone(pid)


def test_an_orphan_without_a_gpu_is_named_and_ended_only_when_asked(
    nvml: Nvml, cast: Cast, capfd: pytest.CaptureFixture[str]
) -> None:
    """The engine of a killed run on a CPU: it holds nothing that the next run needs, so the run goes on."""
    orphan = cast.orphan()
    cpu = parse({"engine": {"device": "cpu"}}, "test")
    assert clean_gpus.check(cpu) == []
    assert f"an earlier run left process {orphan} of" in capfd.readouterr().err
    assert not gone(orphan)
    cpu.clean.kill_orphans = True
    assert [holder.pid for holder in clean_gpus.check(cpu)] == [orphan]
    assert gone(orphan)


def test_an_orphans_descendants_are_counted_in_its_line_and_ended_with_it(
    nvml: Nvml, cast: Cast, capfd: pytest.CaptureFixture[str]
) -> None:
    """A build tool and its compilers are one thing that was left, and all of them go."""
    sleep = "import time; time.sleep(600)"
    middle = f"import subprocess, sys, time; [subprocess.Popen([sys.executable, '-c', {sleep!r}]) for _ in range(2)]; time.sleep(600)"
    top = cast.orphan(
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {middle!r}]); print('up', flush=True); time.sleep(600)"
    )
    deadline = time.monotonic() + 20
    # A process has no environment to be known by until it has become another program.
    while len(below := psutil.Process(top).children(recursive=True)) < 3 or any(
        run_mark.read(process.pid).stage is None for process in below
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    cast.pids += [process.pid for process in below]
    cpu = parse({"engine": {"device": "cpu"}}, "test")
    assert clean_gpus.check(cpu) == []
    (line,) = (line for line in capfd.readouterr().err.splitlines() if "an earlier run left" in line)
    assert f"process {top} of" in line
    assert line.endswith(", and 3 below it; end it, or set clean.kill_orphans: true")
    cpu.clean.kill_orphans = True
    assert {holder.pid for holder in clean_gpus.check(cpu)} == {top, *(process.pid for process in below)}
    assert all(gone(pid) for pid in (top, *(process.pid for process in below)))


def test_a_driver_that_does_not_answer_spares_orphans_on_a_cpu(nvml: Nvml, cast: Cast) -> None:
    """They may be on GPUs, none of which is this job's."""
    orphan = cast.orphan()
    nvml.error = pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
    assert clean_gpus.check(parse({"engine": {"device": "cpu"}, "clean": {"kill_orphans": True}}, "test")) == []
    assert not gone(orphan)


def test_one_that_ends_by_itself_is_waited_for(nvml: Nvml, cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an engine does whose driver has just been killed."""
    monkeypatch.setattr(clean_gpus, "SETTLE_SECONDS", 20.0)
    orphan = cast.orphan("import time; print('up', flush=True); time.sleep(1)")
    nvml.gpus[0].pids[orphan] = GIB
    assert clean_gpus.check(config()) == []
    assert gone(orphan)


def test_processes_of_this_job_are_none_of_its_findings(
    nvml: Nvml, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child of its own; under torchrun also the other ranks, which are children of the same agent."""
    with subprocess.Popen(["sleep", "600"]) as child:
        nvml.gpus[0].pids[child.pid] = 2 * GIB
        assert clean_gpus.check(config()) == []
        child.kill()
    rank, agent = cast.alive()
    monkeypatch.setattr(holders.os, "getppid", lambda: agent)
    assert holders.describe("0", rank, 0).owner == "own"
    monkeypatch.setenv("RANK", "1")
    assert holders.describe("0", rank, 0).owner == "self"


def test_a_mig_device_is_judged_by_its_own_memory_and_processes(
    nvml: Nvml, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = Gpu("MIG-1", instances=(7, 0), refuses=pynvml.NVML_ERROR_NOT_SUPPORTED)
    theirs = Gpu("MIG-2", instances=(9, 0), base=5 * GIB, pids={cast.stranger(): GIB})
    nvml.gpus[0].parts, nvml.gpus[0].base = [mine, theirs], 6 * GIB
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    assert clean_gpus.check(config()) == []
    orphan = cast.orphan()
    mine.pids[orphan] = 2 * GIB
    with pytest.raises(DraftsmithError, match=rf"GPU 0:0: process {orphan} .*2048 MiB"):
        clean_gpus.check(config())
    assert [holder.pid for holder in clean_gpus.check(config(kill_orphans=True))] == [orphan]
    assert gone(orphan)


def test_without_a_gpu_it_says_why(nvml: Nvml, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    clean_gpus.run(parse({"engine": {"device": "cpu"}}, "test"), report=tmp_path / "clean.json")
    assert "nothing to clean, as there is no GPU for this job: engine.device is cpu" in capfd.readouterr().err
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    hardware.gpus.cache_clear()
    clean_gpus.run(config(), report=tmp_path / "clean.json")
    assert re.search(r"no GPU for this job: none was granted\n", capfd.readouterr().err)
    assert json.loads((tmp_path / "clean.json").read_text()) == {"gpus": [], "ended": []}
