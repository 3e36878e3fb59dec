"""The whole workflow on a tiny random model, as a user runs it; then what a changed knob re-runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import tiny
from chain import REPO, Run, config, conversations
from draftsmith import evaluate_draft, gate
from draftsmith.config import Config
from draftsmith.errors import DraftsmithError
from draftsmith.evaluate_draft.servings import Servings
from environment import shell


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
    target, tokens, manifest = (
        chain.json("target.json"),
        chain.json("tokenize/tokenize.json"),
        chain.json("extract/manifest.json"),
    )
    assert target["num_layers"] == 4
    assert manifest["layers"] == [1, 2, 3]
    assert len(manifest["rows"]) == tokens["rows"]
    assert manifest["failed"] == []
    assert chain.json("preflight.json")["verdict"] == "ok"
    assert chain.json("dry_run.json")["verdict"] == "skipped", "unset, and no GPU here"
    trained = chain.json("train/train.json")
    assert trained["steps"] == 6
    evaluated = chain.json("evaluate/evaluate.json")
    assert evaluated["prompts"] == 4
    assert evaluated["outputs_equal"] is True
    assert evaluated["drafts"] > 0
    assert evaluated["acceptance_length"] == pytest.approx(1 + evaluated["accepted"] / evaluated["drafts"], abs=1e-4)
    assert 1.0 <= evaluated["untrained"]["acceptance_length"] < 2.0
    assert [(each["k"], each["temperature"]) for each in evaluated["sweep"]] == [(2, 0.0), (2, 1.0)]
    assert all(each["drafts"] > 0 and len(each["per_position"]) == 2 for each in evaluated["sweep"])
    assert [each["requests"] for each in evaluated["concurrency"]] == [1, 4]
    assert all(min(each["tokens_per_second"].values()) > 0 for each in evaluated["concurrency"])
    page = (chain.folder / "results/tiny/report.html").read_text()
    assert f"{evaluated['acceptance_length']:.2f}" in page


def test_a_draft_that_is_served_with_other_layers_fails_and_the_layers_are_named(
    chain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target alone is not served once more: its answers are those of the chain."""
    results = chain.folder / "results/tiny"
    shutil.copytree(results, tmp_path / "tiny")
    exported = json.loads((tmp_path / "tiny/draft/config.json").read_text())
    exported["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]
    (tmp_path / "tiny/draft/config.json").write_text(json.dumps(exported))
    take = Servings.take

    def draft_alone(self: Servings, name: str, questions: Any, measures: Any, *rest: Any) -> Any:
        if name == "plain":
            (kept,) = (chain.folder / "work/tiny/evaluate").glob("*/plain")
            return {measure: json.loads((kept / f"{measure.name}.json").read_text()) for measure in measures}
        return take(self, name, questions, measures, *rest)

    monkeypatch.setattr(Servings, "take", draft_alone)
    given = yaml.safe_load(chain.config.read_text())
    given["evaluate"] = {"k": 2, "max_tokens": 8, "min_acceptance_length": 3.0}
    report = tmp_path / "tiny/evaluate/evaluate.json"
    evaluate_draft.run(
        Config.model_validate(given), target=results / "target.json", draft=tmp_path / "tiny/draft",
        vocabulary=results / "vocabulary/vocabulary.safetensors", prompts=results / "tokenize/prompts.jsonl",
        workdir=tmp_path / "work", report=report,
    )  # fmt: skip
    with pytest.raises(DraftsmithError, match=r"below evaluate\.min_acceptance_length \(3\.0\)") as failed:
        gate.run(evaluation=report, page=results / "report.html", verdict=tmp_path / "gate.json")
    # What follows is of the training, which is too short to teach anything.
    assert str(failed.value).splitlines()[1:2] == [
        "  - layer ids: the export asks for [0, 1, 2], the draft has learnt from [1, 2, 3]"
    ]


def test_a_draft_below_the_gate_has_its_page(chain: Run, values: dict[str, Any]) -> None:
    """Served once more, as the kept measures are taken; the page says what failed, and the run fails once."""
    values["evaluate"]["min_acceptance_length"] = 3.0
    chain.write(values)
    done = chain.snakemake(check=False)
    assert done.returncode != 0
    assert done.stderr.count("is below evaluate.min_acceptance_length (3.0)") >= 1
    assert "Trying to restart job" not in done.stderr
    assert "gate 3: failed" in (chain.folder / "results/tiny/report.html").read_text()
    told = {job["stage"]: job["state"] for job in chain.command("status", "--json")["jobs"]}
    assert (told["evaluate_draft"], told["report"], told["gate"]) == ("done", "done", "failed")
    values["evaluate"]["min_acceptance_length"] = 1.0
    chain.write(values)
    chain.snakemake()
    assert chain.json("gate.json")["minimum"] == 1.0


def test_status_tells_of_every_stage(chain: Run) -> None:
    told = chain.command("status", "--json")
    jobs = {job["stage"]: job for job in told["jobs"]}
    assert {job["state"] for job in jobs.values()} == {"done"}
    extraction, training = jobs["extract_shard"], jobs["train_draft"]
    assert extraction["batches"] == chain.json("extract/manifest.json")["files"]
    assert (extraction["item"], extraction["unit"]) == ("1-of-1", "rows")
    assert extraction["done"] == extraction["total"] == chain.json("tokenize/tokenize.json")["rows"]
    assert (training["done"], training["total"], training["unit"]) == (6, 6, "steps")
    assert extraction["pid"] != training["pid"], "each by its own word"
    assert told["snakemake"]["finished"] == told["snakemake"]["total"]


def test_the_estimate_is_right(chain: Run) -> None:
    """Bytes to two per cent, and with the run's own rates its times to a quarter."""
    told = chain.command("estimate", "--config", str(chain.config), "--device", "cpu", "--profile", "local", "--json")
    store = next(each for each in told["store"] if each["chosen"])
    manifest = chain.json("extract/manifest.json")
    assert store["files"] == manifest["files"]
    assert store["bytes"] == pytest.approx(manifest["bytes"], rel=0.02)
    assert told["rows"]["how"] == "known"
    assert told["rows"]["tokens"] == manifest["tokens"]
    for time in told["times"]:
        measured = list((chain.folder / "benchmarks/rules/tiny").glob(f"{time['stage']}*/*.tsv"))
        measured += (chain.folder / "benchmarks/rules/tiny").glob(f"{time['stage']}.tsv")
        seconds = float(measured[0].read_text().splitlines()[-1].split("\t")[0])
        assert time["seconds"] == pytest.approx(seconds, rel=0.25), time["stage"]


def test_what_was_simulated_is_what_was_served(chain: Run, tmp_path: Path) -> None:
    """To 5 % on the evaluation's own answers; a draft of six steps is accepted little, and the drafted tokens are compared elsewhere."""
    done = subprocess.run(
        [sys.executable, str(REPO / "benchmarks/simulated.py"), str(chain.config), "--run", str(chain.folder), "--out", str(tmp_path)],
        env=shell() | {"PYTHONPATH": str(REPO / "workflow")}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["answers"] == chain.json("evaluate/evaluate.json")["prompts"]
    assert told["served"] == chain.json("evaluate/evaluate.json")["acceptance_length"]
    assert told["simulated_over_served"] == pytest.approx(1, abs=0.05)


def test_a_second_run_does_nothing(chain: Run) -> None:
    assert "Nothing to be done" in chain.snakemake().stderr


def test_a_changed_learning_rate_trains_again_and_nothing_before(chain: Run, values: dict[str, Any]) -> None:
    values["train"]["learning_rate"] = 3e-4
    assert chain.would_run(values) == {"train_draft", "export_draft", "evaluate_draft", "report", "gate"}


def test_changed_layers_extract_again_but_do_not_tokenise(chain: Run, values: dict[str, Any]) -> None:
    values["target"]["layers"] = [0, 1, 2]
    assert chain.would_run(values) == {
        "preflight", "clean_gpus", "dry_run", "extract_shard", "merge_manifest", "train_draft", "export_draft", "evaluate_draft", "report",
        "gate",
    }  # fmt: skip


def test_how_the_engine_runs_re_runs_nothing(chain: Run, values: dict[str, Any]) -> None:
    values["engine"] |= {"max_num_seqs": 4, "gpu_memory_utilization": 0.5}
    assert chain.would_run(values) == set()


def test_more_evaluation_only_evaluates(chain: Run, values: dict[str, Any]) -> None:
    values["evaluate"]["max_tokens"] = 9
    assert chain.would_run(values) == {"evaluate_draft", "report", "gate"}


def test_the_exported_folder_is_served_by_itself(chain: Run) -> None:
    """`vllm serve DIR` finds the target and the draft length in the draft's own config."""
    code = (
        "import sys; from vllm.engine.arg_utils import EngineArgs; "
        "c = EngineArgs(model=sys.argv[1], max_model_len=64, enforce_eager=True).create_engine_config(); "
        "print('SERVED', c.model_config.model, c.speculative_config.method, c.speculative_config.num_speculative_tokens)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(chain.folder / "results/tiny/draft")], capture_output=True, text=True
    )
    assert f"SERVED {chain.folder / 'model'} eagle3 3" in done.stdout, done.stdout + done.stderr
