"""The command: JSON for machines, tables for people, from a folder with nothing but config.json and without PyTorch."""

from __future__ import annotations

import json
import os
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


def command(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(REPO / "workflow"), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-c", _WATCHED, *arguments], capture_output=True, text=True, cwd=tmp_path, env=environment
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
