"""Every stage that uses GPUs begins by looking at them, before it reads or loads anything."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from draftsmith import clean_gpus, cli, dry_run, engine, hardware
from draftsmith.config import parse
from draftsmith.errors import DraftsmithError
from draftsmith.gpus import gpu_job, gpu_lease
from draftsmith.processes import run_mark, runtime_folder
from fake_nvml import Nvml, h200s

SETTINGS = '{"preflight": {"dry_run": true}, "engine": {"tp": 2}}'
# Each stage's command with files that are not there, and whether it needs as many GPUs as tensor parallelism.
STAGES = {
    "clean-gpus": ("--report r.json", False),
    "dry-run": ("--target t.json --rows r.parquet --report r.json", True),
    "extract-shard": ("--target t.json --rows r.parquet --scatteritem 1-of-1 --manifest m.json", True),
    "regenerate": ("--target t.json --workdir w --scatteritem 1-of-1 --report r.json", True),
    "train-draft": (
        "--target t.json --rows r.parquet --manifest m.json --vocabulary v --workdir w --draft d --report r.json",
        False,
    ),
    "evaluate-draft": ("--target t.json --draft d --vocabulary v --prompts p.jsonl --workdir w --report r.json", True),
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Nvml]:
    """Four free GPUs, and no mark, lease or Slurm job around this process."""
    for name in ("SLURM_JOB_ID", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", run_mark.LEASED, run_mark.MARK):
        # So that what a stage sets is taken back afterwards.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv(runtime_folder.VARIABLE, str(tmp_path / "runtime"))
    monkeypatch.chdir(tmp_path)
    fake = Nvml(h200s(4))
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    hardware.gpus.cache_clear()
    yield fake
    gpu_lease._let_go()
    hardware.gpus.cache_clear()


class Looked(Exception):
    """The cleaning was reached."""


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What CUDA_VISIBLE_DEVICES was at each look at the GPUs; the first ends the stage."""
    seen: list[str] = []

    def check(config: Any) -> None:
        seen.append(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
        raise Looked

    monkeypatch.setattr(clean_gpus, "check", check)
    return seen


def call(stage: str, *more: str) -> Exception | None:
    arguments, _ = STAGES[stage]
    settings = [] if stage == "clean-gpus" else ["--settings", SETTINGS]
    done = CliRunner().invoke(cli.app, [stage, *settings, "--config", SETTINGS, *arguments.split(), *more])
    assert done.exception is None or isinstance(done.exception, Looked | DraftsmithError), done.exception
    return done.exception  # type: ignore[return-value]


@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_on_gpus_looks_at_its_own_and_no_others(stage: str, machine: Nvml, looks: list[str]) -> None:
    """Two of the four, as many as the scheduler has granted; the files that it would read are not even there."""
    assert isinstance(call(stage, "--gpus", "2"), Looked)
    assert looks == ["0,1"]


@pytest.mark.parametrize("stage", [stage for stage, (_, needs) in STAGES.items() if needs])
def test_too_few_gpus_are_told_before_anything_else(stage: str, machine: Nvml, looks: list[str]) -> None:
    error = call(stage, "--gpus", "1")
    assert str(error).startswith("engine.tp is 2, but this job was granted 1 GPU(s); offer more")
    machine.gpus[1:] = []
    hardware.gpus.cache_clear()
    assert str(call(stage, "--gpus", "2")).startswith("engine.tp is 2 and this job was granted 2 GPU(s), but it sees 1")
    assert looks == []


def test_every_rule_with_a_gpu_says_how_many_it_was_granted(repo: Path) -> None:
    """The rules that ask for GPUs are those of the list above, and preflight, which only reads figures of them."""
    texts = {path.stem: path.read_text() for path in (repo / "workflow/rules").glob("*.smk")}
    asking = {name for name, text in texts.items() if "gpu=" in text}
    assert {name.replace("_", "-") for name in asking} == {*STAGES, "preflight"}
    for name in asking:
        assert "--gpus {resources.gpu}" in texts[name], name


def test_by_hand_a_stage_takes_what_the_engine_needs_and_training_takes_all(machine: Nvml, looks: list[str]) -> None:
    assert isinstance(call("extract-shard"), Looked)
    gpu_lease._let_go()
    for name in ("CUDA_VISIBLE_DEVICES", run_mark.LEASED):
        os.environ.pop(name)
    hardware.gpus.cache_clear()
    assert isinstance(call("train-draft"), Looked)
    assert looks == ["0,1", "0,1,2,3"]


@pytest.mark.parametrize(("gpus", "expected"), [("1,3", "1,3"), ("4-7", "0,1,2,3")])
def test_what_only_slurm_says_is_passed_on_to_cuda(
    machine: Nvml, looks: list[str], monkeypatch: pytest.MonkeyPatch, gpus: str, expected: str
) -> None:
    """Two of a node's four, and four of eight where the others are hidden and these numbered anew."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_GPUS", gpus)
    hardware.gpus.cache_clear()
    assert isinstance(call("extract-shard", "--gpus", str(len(expected.split(",")))), Looked)
    assert looks == [expected]


def test_training_that_was_granted_none_sees_none(machine: Nvml, looks: list[str]) -> None:
    assert isinstance(call("train-draft", "--gpus", "0"), Looked)
    assert hardware.device() == "cpu"
    assert looks == [""]


def test_what_a_served_target_answers_needs_no_gpu(machine: Nvml, looks: list[str]) -> None:
    settings = '{"regenerate": {"enabled": true, "endpoint": "http://127.0.0.1:1/v1"}}'
    arguments = ["regenerate", "--settings", settings, "--config", settings, *STAGES["regenerate"][0].split()]
    assert isinstance(CliRunner().invoke(cli.app, arguments).exception, DraftsmithError)
    assert looks == []


def test_on_a_cpu_nothing_is_taken(machine: Nvml, looks: list[str], tmp_path: Path) -> None:
    with pytest.raises(Looked):
        gpu_job.begin(parse({"engine": {"device": "cpu"}}, "test"), None)
    assert not (tmp_path / "runtime/gpus").exists()


def test_the_dry_run_hands_its_gpus_on(machine: Nvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extraction that it starts is of the same run, so it takes no others beside them."""
    monkeypatch.setattr(clean_gpus, "check", lambda config: [])
    config = parse({"engine": {"tp": 2}}, "test")
    gpu_job.begin(config, 2)
    program = (
        "import os, fake_nvml; fake_nvml.install(fake_nvml.Nvml(fake_nvml.h200s(4)))\n"
        "from draftsmith.gpus import gpu_lease; gpu_lease.take(2, 0, 1024); print(os.environ['CUDA_VISIBLE_DEVICES'])"
    )
    done = dry_run.subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ":".join(sys.path)}
    )  # fmt: skip
    assert done.stdout == "0,1\n", done.stderr


def test_an_engine_carries_the_runs_mark_and_its_drivers_number(machine: Nvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    for name in list(os.environ):
        if name.startswith(("VLLM_", "DRAFTSMITH_DRIVER")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_PROCESS_NAME_PREFIX", "an earlier run's")
    monkeypatch.setenv("DRAFTSMITH_DRIVER", "1-1")
    engine.prepare_environment(parse({}, "test"), tmp_path)
    assert os.environ["VLLM_PROCESS_NAME_PREFIX"] == f"{run_mark.MARK}={os.environ[run_mark.MARK]}"
    assert os.environ["DRAFTSMITH_DRIVER"].startswith(f"{os.getpid()}-")


def test_a_jobs_shell_knows_its_snakemake(repo: Path) -> None:
    """By which a stage is known whose Snakemake was killed."""
    text = (repo / "workflow/rules/common.smk").read_text()
    assert "unset {run_mark.MARK} {run_mark.LEASED};" in text
    assert "export DRAFTSMITH_CONSOLE=3 {run_mark.WORKFLOW}={run_mark.own()}" in text
