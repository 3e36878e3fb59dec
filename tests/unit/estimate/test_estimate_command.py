"""The command: JSON for machines, tables for people, from a folder with nothing but config.json and without PyTorch."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from targets import KIMI, SMOLLM, folder

from draftsmith import estimate
from draftsmith.errors import DraftsmithError
from draftsmith.estimate import jobs, rates
from draftsmith.estimate.model import Estimate

REPO = Path(__file__).resolve().parents[3]
# Prints what a command has imported after it has ended.
_WATCHED = """
import sys
from draftsmith.cli import app
try:
    app(sys.argv[1:])
except SystemExit:
    pass
print(sorted({'torch', 'vllm', 'transformers', 'datasets', 'plotly'} & set(sys.modules)), file=sys.stderr)
"""


def written(tmp_path: Path, **sections: Any) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"name": "mine", **sections}))
    return path


def command(tmp_path: Path, *arguments: str, main: bool = False, **variables: str) -> subprocess.CompletedProcess[str]:
    """``main`` runs it as people do, with errors in their own words."""
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    environment |= {"PYTHONPATH": str(REPO / "workflow"), "HF_HUB_OFFLINE": "1"} | variables
    program = ["-m", "draftsmith"] if main else ["-c", _WATCHED]
    return subprocess.run(
        [sys.executable, *program, *arguments], capture_output=True, text=True, cwd=tmp_path, env=environment
    )  # fmt: skip


def test_kimi_from_its_config_alone_in_under_ten_seconds(tmp_path: Path) -> None:
    """The config that ships, against the Slurm profile; seconds of computing, as others may be at work here too."""
    target = folder(tmp_path / "kimi", KIMI)
    config = yaml.safe_load((REPO / "config/kimi-k2.5.yaml").read_text())
    config["data"]["sources"] = [{"path": str(REPO / "config/demo/prompts.jsonl")}]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = command(
        tmp_path, "estimate", "--config", str(written(tmp_path, **config)), "--target", str(target), "--profile", "slurm", "--json",
        "--rate", "extract=2280", "--rate", "load=1080", "--gpu-gib", "139",
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10
    assert done.stderr.splitlines()[-1] == "[]"
    jsonschema.validate(told, Estimate.model_json_schema())
    chosen = next(each for each in told["store"] if each["chosen"])
    assert chosen["bytes_per_token"] == 57_344
    assert chosen["bytes"] == pytest.approx(told["rows"]["tokens"] * 57_344, rel=0.001)
    assert told["rows"]["how"] == "estimated"
    assert told["target"] | {"read_from": ""} == {
        "source": "moonshotai/Kimi-K2.5", "model_type": "kimi_k25", "read_from": "", "num_layers": 61, "hidden_size": 7168,
        "vocab_size": 163840, "layers": [2, 30, 58], "dtype": "bfloat16", "device": "cuda", "tp": 8,
    }  # fmt: skip
    extraction = next(time for time in told["times"] if time["stage"] == "extract_shard")
    assert extraction["seconds"] == pytest.approx(1080 + told["rows"]["tokens"] / 2280)
    # What Snakemake would submit was asked of Snakemake.
    checks = {check["name"]: check for check in told["checks"]}
    assert "720 are asked for" in checks["extract_shard: time"]["detail"]
    assert "200.0 GB" in checks["extract_shard: memory"]["detail"]
    assert checks["extraction: GPU memory"]["status"] == "ok"


def test_tables_for_people(tmp_path: Path) -> None:
    target = folder(tmp_path / "target", SMOLLM)
    config = written(
        tmp_path, data={"sources": [{"path": str(REPO / "config/demo/prompts.jsonl")}]}, regenerate={"enabled": True}
    )
    done = command(
        tmp_path, "estimate", "--config", str(config), "--target", str(target), "--device", "cpu", "--profile", "local"
    )
    assert done.returncode == 0, done.stderr
    for part in (
        "rows (estimated",
        "extract.storage",
        "9,216",
        "formula",
        "7 TTT steps",
        "unknown: give --rate extract",
        "store, work and results: disk",
        "assumed: ",
    ):
        assert part in done.stdout, part


def test_no_line_is_wider_than_the_columns_that_are_named(tmp_path: Path) -> None:
    target = folder(tmp_path / "target", SMOLLM)
    config = written(tmp_path, data={"sources": [{"path": str(REPO / "config/demo/conversations.jsonl")}]})
    arguments = ["estimate", "--config", str(config), "--target", str(target), "--device", "cpu", "--profile", "local"]
    narrow, wide = command(tmp_path, *arguments, COLUMNS="80"), command(tmp_path, *arguments)
    assert narrow.returncode == wide.returncode == 0, narrow.stderr
    assert max(map(len, narrow.stdout.splitlines())) <= 80
    assert max(len(line.rstrip()) for line in wide.stdout.splitlines()) > 80
    # Nothing is lost of what is wrapped.
    assert (
        "".join(narrow.stdout.split()).count("unknown:give") == "".join(wide.stdout.split()).count("unknown:give") > 0
    )


def test_a_measured_run_that_was_never_made_is_one_sentence_with_its_mend(tmp_path: Path) -> None:
    done = command(tmp_path, "estimate", "--config", str(written(tmp_path)), "--measured", "results/demo", main=True)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "error: results/demo: no run has left results there" in line
    assert "`make demo` leaves results/demo" in line


def test_every_rate_has_its_unit_in_the_help(tmp_path: Path) -> None:
    helped = " ".join(command(tmp_path, "estimate", "--help", COLUMNS="300").stdout.split())
    units = helped[helped.index("NAME=NUMBER") : helped.index("--rates")]
    assert "In tokens/s: extract of each shard's engine" in units
    assert "train of each training process" in units
    assert {name for name in rates.GIVEN if not re.search(rf"\b{name}\b", units)} == set()
    # The first stage's own words of it, and README's.
    readme = (REPO / "README.md").read_text()
    assert "`extract` in tokens/s of each shard's engine" in readme
    assert "`train` in tokens/s of each training process" in readme


def test_a_training_on_two_nodes_has_the_processes_that_its_job_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice as many as on one node, of which each node's memory holds its own."""
    target = folder(tmp_path / "kimi", KIMI)
    config = written(
        tmp_path,
        target={"source": "/models/elsewhere", "layers": [2, 30, 58]},
        engine={"tp": 8},
        data={"sources": [{"path": str(REPO / "config/demo/prompts.jsonl")}]},
    )
    monkeypatch.chdir(tmp_path)

    def asked() -> Estimate:
        return estimate.estimate(
            estimate.Asked(
                config, target=target, device="cuda", profile="slurm", rows=4000, row_tokens=4096, rates=["train=1000"], gpu_gib=139
            )
        )  # fmt: skip

    def training(found: Estimate) -> Any:
        return next(time for time in found.times if time.stage == "train_draft")

    monkeypatch.setenv("DRAFTSMITH_TRAIN_NODES", "2")
    two = asked()
    assert any("16 training process(es) on 2 nodes" in line for line in two.assumptions)
    # 1000 tokens a second and process; every GPU of the job counts.
    assert training(two).seconds == pytest.approx(training(two).fixed_seconds + training(two).work / 16_000)
    assert training(two).gpu_seconds == pytest.approx(training(two).seconds * 16)
    # What Slurm is asked for is known though the config's folder is not on this machine.
    assert "train_draft: time" in {check.name for check in two.checks}
    # As Snakemake prints a job of one node, and one of a machine without Slurm, which is given what this machine has.
    for resources in ("gpu=8, nodes=1, slurm_partition=gpu", "gpu=0, nodes=1"):
        text = f"rule train_draft:\n    resources: {resources}\n"
        monkeypatch.setattr(jobs.DryRun, "asked", lambda self, text=text: jobs.parse(text))
        monkeypatch.setattr(jobs.DryRun, "__init__", lambda self, *arguments: None)
        one = asked()
        assert any("side by side, 8 training process(es)" in line for line in one.assumptions)
        assert training(one).gpu_seconds == pytest.approx(training(one).seconds * 8)
        assert one.training_host == two.training_host


def test_shards_and_training_on_all_gpus_of_one_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines beside one another share the machine's memory; the training's GPUs may be more than a shard's."""
    target = folder(tmp_path / "target", SMOLLM)
    config = written(tmp_path, data={"sources": [{"path": str(REPO / "config/demo/prompts.jsonl")}]})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jobs.DryRun, "__init__", lambda self, *arguments: None)

    def asked(shards: int, gpus: int, device: str = "cuda") -> tuple[str, Estimate]:
        rules = [
            f"rule train_draft:\n    resources: gpu={gpus}, nodes=1\n",
            *["rule extract_shard:\n    resources: gpu=1\n"] * shards,
        ]
        monkeypatch.setattr(jobs.DryRun, "asked", lambda self: jobs.parse("".join(rules)))
        found = estimate.estimate(
            estimate.Asked(config, target=target, device=device, rows=400, row_tokens=512, gpu_gib=139)
        )
        return next(check.detail for check in found.checks if check.name == "extract_shard: memory"), found

    def needs(detail: str) -> float:
        return float(re.search(r"about ([\d.,]+) GB", detail)[1].replace(",", ""))  # type: ignore[index]

    (one, alone), (eight, many) = asked(1, 1), asked(8, 8)
    assert needs(eight) > 4 * needs(one) > 0
    assert [next(line for line in found.assumptions if "side by side" in line) for found in (alone, many)] == [
        "1 shard(s) side by side, 1 training process(es)", "8 shard(s) side by side, 8 training process(es)",
    ]  # fmt: skip
    # On a CPU they take turns, and one process trains.
    (on_cpu, told), (alone_there, _) = asked(8, 0, "cpu"), asked(1, 0, "cpu")
    assert needs(on_cpu) <= needs(alone_there)
    assert "8 shard(s) side by side, 1 training process(es)" in told.assumptions


def test_shards_of_the_profile_or_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_SHARDS", "3")
    target = folder(tmp_path / "target", SMOLLM)
    config = written(
        tmp_path,
        data={"sources": [{"path": str(REPO / "config/demo/prompts.jsonl")}]},
        extract={"store": str(tmp_path / "s")},
    )

    def extraction(**more: Any) -> Any:
        asked = estimate.Asked(
            config, target=target, device="cuda", profile="slurm", rows=100, row_tokens=50, rates=["extract=10"], **more
        )
        return next(time for time in estimate.estimate(asked).times if time.stage == "extract_shard")

    monkeypatch.chdir(tmp_path)
    three, five = extraction(), extraction(shards=5)
    assert (three.jobs, five.jobs) == (3, 5)
    assert three.seconds == pytest.approx(three.fixed_seconds + 5000 / 10 / 3)
    assert five.seconds == pytest.approx(three.fixed_seconds + 5000 / 10 / 5)


def test_a_hub_id_without_a_network_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = written(tmp_path, target={"source": "someone/Model"})
    with pytest.raises(
        DraftsmithError, match=r"target.source someone/Model: its config.json is not here .* with --target"
    ):
        estimate.estimate(estimate.Asked(config, rows=1, row_tokens=1))


def test_a_package_that_was_not_unpacked_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = written(tmp_path, extract={"store": "store"})
    found = estimate.estimate(estimate.Asked(config, rows=10, row_tokens=100, device="cpu", profile="local"))
    assert (found.target.num_layers, found.target.hidden_size, found.target.vocab_size) == (30, 576, 49152)
    # 134,515,008 parameters in float32, as the file's own head counts them.
    weights = next(figure for figure in found.extraction_host if figure.name == "weights")
    assert weights.bytes == 4 * 134_515_008
    # It only looks.
    assert sorted(path.name for path in tmp_path.iterdir()) in (["run.yaml"], [".snakemake", "run.yaml"])
