"""The whole workflow on a tiny random model, as a user runs it; then what a changed knob re-runs."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import tiny

REPO = Path(__file__).resolve().parents[2]
STAGES = [
    "get_target", "tokenize", "preflight", "clean_gpus", "extract_shard", "merge_manifest", "map_vocabulary", "train_draft", "export_draft",
    "evaluate_draft", "report", "all",
]  # fmt: skip


def conversations(path: Path, count: int = 48) -> None:
    """Short conversations of a few words in two domains."""
    random.seed(1)
    words = "red green blue cat dog sun moon one two three four five".split()
    with open(path, "w") as file:
        for place in range(count):
            messages = []
            for _ in range(1 + place % 2):
                messages.append({"role": "user", "content": " ".join(random.choices(words, k=5))})
                messages.append({"role": "assistant", "content": " ".join(random.choices(words[:4], k=8))})
            file.write(json.dumps({"id": f"c{place}", "domain": ("left", "right")[place % 2], "messages": messages}) + "\n")


def config(folder: Path, model: Path) -> dict[str, Any]:
    return {
        "name": "tiny",
        "target": {"source": str(model)},
        "engine": {"max_num_batched_tokens": 128, "max_num_seqs": 8, "kv_cache_gib": 0.2},
        "data": {"sources": [{"path": str(folder / "conversations.jsonl")}]},
        "tokenize": {"max_length": 512, "evaluation_per_domain": 2, "validation_fraction": 0.1},
        "extract": {"store": str(folder / "store"), "batch_tokens": 512},
        "vocabulary": {"size": 128},
        "train": {"ttt_steps": 2, "max_steps": 6, "pack_tokens": 512, "save_steps": 2, "eval_steps": 3, "logging_steps": 1},
        "evaluate": {"k": 2, "max_tokens": 8, "untrained": True},
    }


class Run:
    """A working folder with a config, and snakemake as it is typed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "config.yaml"

    def write(self, values: dict[str, Any]) -> None:
        self.config.write_text(yaml.safe_dump(values))

    def snakemake(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [
                sys.executable, "-m", "snakemake", "-s", str(REPO / "Snakefile"), "-d", str(self.folder), "--profile",
                str(REPO / "profiles/local"), "--configfile", str(self.config), *arguments,
            ],
            capture_output=True, text=True, env=environment,
        )  # fmt: skip
        if check and done.returncode:
            raise AssertionError(done.stdout[-4000:] + done.stderr[-12000:])
        return done

    def json(self, name: str) -> Any:
        return json.loads((self.folder / "results/tiny" / name).read_text())

    def would_run(self, values: dict[str, Any]) -> set[str]:
        """Rules that a dry run with this config names."""
        self.write(values)
        text = self.snakemake("-n").stdout
        return set(re.findall(r"^(?:local)?rule (\w+):", text, re.M)) - {"all"}


@pytest.fixture(scope="session")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("chain")
    model = tiny.model(folder / "model", num_hidden_layers=4)
    conversations(folder / "conversations.jsonl")
    run = Run(folder)
    run.write(config(folder, model))
    run.snakemake()
    return run


@pytest.fixture
def values(chain: Run) -> Any:
    """The chain's config, to be changed; put back afterwards."""
    given = yaml.safe_load(chain.config.read_text())
    yield yaml.safe_load(chain.config.read_text())
    chain.write(given)


def test_every_stage_left_its_output(chain: Run) -> None:
    target, tokens, manifest = chain.json("target.json"), chain.json("tokenize/tokenize.json"), chain.json("extract/manifest.json")
    assert target["layers"] == [1, 2, 3] or target["layers"] == sorted(target["layers"])
    assert len(manifest["rows"]) == tokens["rows"]
    assert manifest["failed"] == []
    assert chain.json("preflight.json")["verdict"] == "ok"
    trained = chain.json("train/train.json")
    assert trained["steps"] == 6
    evaluated = chain.json("evaluate/evaluate.json")
    assert evaluated["prompts"] == 4
    assert evaluated["outputs_equal"] is True
    assert evaluated["drafts"] > 0
    assert evaluated["acceptance_length"] == pytest.approx(1 + evaluated["accepted"] / evaluated["drafts"], abs=1e-4)
    assert 1.0 <= evaluated["untrained"]["acceptance_length"] < 2.0
    page = (chain.folder / "results/tiny/report.html").read_text()
    assert f"{evaluated['acceptance_length']:.2f}" in page


def test_a_second_run_does_nothing(chain: Run) -> None:
    assert "Nothing to be done" in chain.snakemake().stderr


def test_a_changed_learning_rate_trains_again_and_nothing_before(chain: Run, values: dict[str, Any]) -> None:
    values["train"]["learning_rate"] = 3e-4
    assert chain.would_run(values) == {"train_draft", "export_draft", "evaluate_draft", "report"}


def test_changed_layers_extract_again_but_do_not_tokenise(chain: Run, values: dict[str, Any]) -> None:
    """get_target writes the layer ids into target.json, from which all that needs them takes them."""
    values["target"]["layers"] = [0, 1, 2]
    assert {"extract_shard", "merge_manifest", "train_draft", "export_draft", "evaluate_draft", "report"} <= chain.would_run(values)


def test_how_the_engine_runs_re_runs_nothing(chain: Run, values: dict[str, Any]) -> None:
    values["engine"] |= {"max_num_seqs": 4, "gpu_memory_utilization": 0.5}
    assert chain.would_run(values) == set()


def test_more_evaluation_only_evaluates(chain: Run, values: dict[str, Any]) -> None:
    values["evaluate"]["max_tokens"] = 9
    assert chain.would_run(values) == {"evaluate_draft", "report"}


def test_the_exported_folder_is_served_by_itself(chain: Run) -> None:
    """`vllm serve DIR` finds the target and the draft length in the draft's own config."""
    code = (
        "import sys; from vllm.engine.arg_utils import EngineArgs; "
        "c = EngineArgs(model=sys.argv[1], max_model_len=64, enforce_eager=True).create_engine_config(); "
        "print('SERVED', c.model_config.model, c.speculative_config.method, c.speculative_config.num_speculative_tokens)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(chain.folder / "results/tiny/draft")], capture_output=True, text=True)
    assert f"SERVED {chain.folder / 'model'} eagle3 3" in done.stdout, done.stdout + done.stderr
