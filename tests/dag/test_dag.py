"""The DAG, by Snakemake's API: what runs, how often, and with which resources and settings."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from snakemake.api import SnakemakeApi
from snakemake.settings.types import (
    ConfigSettings,
    DAGSettings,
    OutputSettings,
    Quietness,
    ResourceSettings,
    StorageSettings,
)

from draftsmith import cli

REPO = Path(__file__).resolve().parents[2]
ONCE = {
    "all", "get_target", "tokenize", "preflight", "clean_gpus", "dry_run", "merge_manifest", "map_vocabulary", "look", "train_draft",
    "export_draft", "evaluate_draft", "report", "gate",
}  # fmt: skip
ON_GPUS = {"preflight", "clean_gpus", "dry_run", "extract_shard", "train_draft", "evaluate_draft"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with three conversations; the test is in it, as Snakemake goes there."""
    monkeypatch.chdir(tmp_path)
    # The Snakefile sets it for its jobs, and runs in this process.
    monkeypatch.setenv("DRAFTSMITH_CONFIG", "")
    write_rows(tmp_path / "conversations.jsonl", 3)
    return tmp_path


def write_rows(path: Path, count: int) -> None:
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello!"}]
    with open(path, "w") as file:
        for place in range(count):
            print(json.dumps({"id": f"c{place}", "domain": "chat", "messages": messages}), file=file)


def jobs(folder: Path, *, shards: int | None = None, gpus: int = 64, **sections: Any) -> list[Any]:
    """Jobs of a dry run with this config."""
    values = {"name": "trial", "data": {"sources": [{"path": "conversations.jsonl"}]}} | sections
    (folder / "my.yaml").write_text(yaml.safe_dump(values))
    scatter = {} if shards is None else {"extract": shards, "regenerate": shards}
    with SnakemakeApi(OutputSettings(quiet={Quietness.ALL}, dryrun=True)) as api:
        workflow = api.workflow(
            resource_settings=ResourceSettings(cores=64, resources={"gpu": gpus}, overwrite_scatter=scatter),
            config_settings=ConfigSettings(configfiles=[folder / "my.yaml"]),
            storage_settings=StorageSettings(),
            snakefile=REPO / "Snakefile",
            workdir=folder,
        )
        workflow.dag(DAGSettings()).execute_workflow(executor="dryrun")
        # Private, hence Snakemake's version is pinned.
        return list(workflow._workflow.dag.jobs)


def counts(found: list[Any]) -> Counter[str]:
    return Counter(job.rule.name for job in found)


def only(found: list[Any], rule: str) -> Any:
    (job,) = [job for job in found if job.rule.name == rule]
    return job


def inputs(job: Any) -> set[str]:
    return {str(path) for path in job.input}


def test_every_rule_runs_once(folder: Path) -> None:
    assert counts(jobs(folder)) == dict.fromkeys(ONCE | {"extract_shard"}, 1)


@pytest.mark.parametrize("shards", [2, 5])
def test_the_dag_grows_with_shards(folder: Path, shards: int) -> None:
    found = jobs(folder, shards=shards)
    assert counts(found) == dict.fromkeys(ONCE, 1) | {"extract_shard": shards}
    expected = {f"results/trial/extract/shards/{place}-of-{shards}.json" for place in range(1, shards + 1)}
    assert {str(path) for job in found if job.rule.name == "extract_shard" for path in job.output} == expected
    assert inputs(only(found, "merge_manifest")) == expected | {"results/trial/tokenize/rows.parquet"}
    assert expected < inputs(only(found, "report"))


def test_the_dag_does_not_grow_with_the_data(folder: Path) -> None:
    """10,000 conversations in batches of one token, so of one row each: the same jobs."""
    few = counts(jobs(folder, shards=2))
    write_rows(folder / "conversations.jsonl", 10_000)
    assert counts(jobs(folder, shards=2, extract={"batch_tokens": 1})) == few


def test_regenerate_is_in_the_dag_only_when_asked_for(folder: Path) -> None:
    without = jobs(folder)
    assert not {"regenerate", "merge_answers"} & set(counts(without))
    assert inputs(only(without, "tokenize")) == {"conversations.jsonl", "results/trial/target.json"}
    regenerated = jobs(folder, regenerate={"enabled": True})
    assert counts(regenerated)["regenerate"] == 1
    assert "conversations.jsonl" in inputs(only(regenerated, "regenerate"))
    answers = "results/trial/regenerate/conversations.jsonl"
    assert inputs(only(regenerated, "tokenize")) == {answers, "results/trial/target.json"}
    assert only(regenerated, "tokenize").params.conversations == f"--conversations {answers}"
    # Answered by as many engines as extract; each asks its own part, and the parts are joined.
    split = jobs(folder, shards=3, regenerate={"enabled": True})
    assert (counts(split)["regenerate"], counts(split)["extract_shard"]) == (3, 3)
    written = {f"results/trial/regenerate/shards/{place}-of-3.json" for place in (1, 2, 3)}
    assert written < inputs(only(split, "merge_answers"))
    asked = {re.search(r"--scatteritem (\S+)", job.shellcmd)[1] for job in split if job.rule.name == "regenerate"}  # type: ignore[index]
    assert asked == {"1-of-3", "2-of-3", "3-of-3"}


def test_servers_are_asked_by_one_job_whatever_the_shards(folder: Path) -> None:
    served = jobs(folder, shards=3, regenerate={"enabled": True, "endpoint": "http://one/v1"})
    assert (counts(served)["regenerate"], counts(served)["extract_shard"]) == (1, 3)
    assert "--scatteritem 1-of-1 " in only(served, "regenerate").shellcmd


@pytest.mark.parametrize(("engine", "threads"), [({}, 8), ({"tp": 2}, 16), ({"tp": 8}, 32), ({"device": "cpu"}, 32)])
def test_engines_of_eight_gpus_share_a_machines_cores(folder: Path, engine: dict[str, Any], threads: int) -> None:
    """Eight shards of one GPU each run side by side on 64 cores; a CPU's engine takes what is there."""
    assert only(jobs(folder, engine=engine), "extract_shard").threads == threads


def test_a_server_needs_no_gpu_and_its_address_is_no_param(folder: Path) -> None:
    """It is asked from where Snakemake runs, as other nodes of a cluster may not reach it."""

    def is_local(job: Any) -> bool:
        return job.rule.name in job.rule.workflow._localrules

    by_engine = only(jobs(folder, regenerate={"enabled": True}), "regenerate")
    first, second = (
        only(
            jobs(folder, engine={"tp": 8}, regenerate={"enabled": True, "endpoint": f"http://{host}/v1"}), "regenerate"
        )
        for host in ("one", "two")
    )
    assert (is_local(by_engine), by_engine.resources["gpu"], by_engine.params.by) == (False, 1, "engine")
    assert (is_local(first), first.resources["gpu"], first.params.by) == (True, 0, "server")
    assert dict(first.params.items()) == dict(second.params.items())
    assert "http" not in str(dict(first.params.items()))


@pytest.mark.parametrize(("engine", "expected"), [({"tp": 8}, 8), ({}, 1), ({"tp": 4, "device": "cpu"}, 0)])
def test_jobs_ask_for_as_many_gpus_as_tensor_parallelism_needs(
    folder: Path, engine: dict[str, Any], expected: int
) -> None:
    found = jobs(folder, engine=engine, regenerate={"enabled": True})
    asked = {job.rule.name: job.resources["gpu"] for job in found if "gpu" in job.resources.keys()}  # noqa: SIM118
    assert asked == dict.fromkeys(ON_GPUS | {"regenerate"}, expected)


def test_every_job_says_what_it_costs(folder: Path) -> None:
    for job in jobs(folder, regenerate={"enabled": True}):
        if job.rule.name == "all":
            continue
        assert job.resources["mem_mb"] >= 4000, job.rule.name
        assert job.resources["runtime"] >= 10, job.rule.name
        assert len(job.log) == 1, job.rule.name
        assert job.rule.restart_times == 0, "a rule's own retries multiply with the scheduler's"


def test_the_dry_run_stands_between_free_gpus_and_the_first_load(folder: Path) -> None:
    found = jobs(folder)
    for rule, needs in (("clean_gpus", "preflight"), ("dry_run", "clean_gpus"), ("extract_shard", "dry_run")):
        assert f"results/trial/{needs}.json" in inputs(only(found, rule)), rule
    assert {"results/trial/preflight.json", "results/trial/dry_run.json"} < inputs(only(found, "report"))


def test_whether_there_is_a_dry_run_is_no_param(folder: Path) -> None:
    assert settings(jobs(folder)) == settings(jobs(folder, preflight={"dry_run": False}))


def test_long_rules_are_timed(folder: Path) -> None:
    timed = {job.rule.name for job in jobs(folder, regenerate={"enabled": True}) if job.benchmark}
    assert {"regenerate", "extract_shard", "train_draft", "evaluate_draft"} <= timed


def test_a_second_attempt_has_more_time(folder: Path) -> None:
    job = only(jobs(folder), "extract_shard")
    first = job.resources["runtime"]
    job.attempt = 2
    job.reset_params_and_resources()
    assert job.resources["runtime"] == 2 * first


def settings(found: list[Any]) -> dict[str, Any]:
    return {job.rule.name: dict(job.params.items()) for job in found if job.params}


def test_how_the_engine_runs_is_no_param(folder: Path) -> None:
    """So that a change of it re-runs nothing."""
    before = settings(jobs(folder))
    after = settings(jobs(folder, engine={"tp": 4, "max_num_seqs": 3}))
    assert before == after


@pytest.mark.parametrize(
    ("sections", "again"),
    [
        ({"extract": {"storage": "fp8"}}, True),
        ({"extract": {"supervised_only": True}}, True),
        ({"target": {"layers": [1, 2, 3]}}, True),
        ({"target": {"dtype": "bfloat16"}}, True),
        ({"target": {"revision": "abc"}}, True),
        ({"engine": {"args": {"quantization": "fp8"}}}, True),
        ({"engine": {"device": "cpu", "tp": 8, "max_num_batched_tokens": 512, "enforce_eager": False}}, False),
        ({"train": {"epochs": 1}, "vocabulary": {"size": 10}, "clean": {"kill_orphans": True}}, False),
    ],
)
def test_states_are_asked_for_again_where_they_may_differ(folder: Path, sections: dict[str, Any], again: bool) -> None:
    """What is in the store already is then found there; a change of anything else does not even look."""
    before = only(jobs(folder), "extract_shard").params.settings
    assert (only(jobs(folder, **sections), "extract_shard").params.settings != before) == again


def test_another_template_makes_other_rows(folder: Path) -> None:
    """Which the extraction takes as its input."""
    before, after = jobs(folder), jobs(folder, tokenize={"template_args": {"enable_thinking": False}})
    assert only(before, "tokenize").params.settings != only(after, "tokenize").params.settings
    assert "results/trial/tokenize/rows.parquet" in inputs(only(after, "extract_shard"))


def test_a_shard_is_told_nothing_but_its_number(folder: Path) -> None:
    """So that the states of any number of shards, on any machines, are the same ones."""
    alone = only(jobs(folder), "extract_shard").params.settings
    shards = [job for job in jobs(folder, shards=3, gpus=8) if job.rule.name == "extract_shard"]
    assert [job.params.settings for job in shards] == [alone] * 3


def test_the_working_folder_is_no_param(folder: Path) -> None:
    """A run that was moved is not run anew."""
    assert str(REPO) not in json.dumps(settings(jobs(folder)), default=str)
    assert str(folder) not in json.dumps(settings(jobs(folder)), default=str)


def test_commands_and_options_of_the_rules_exist(folder: Path) -> None:
    """Each rule gives every option that its command demands, and none that it does not have."""
    every = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    # A group of commands, as `draftsmith store` is one, is no stage.
    commands = {name: command for name, command in every.items() if not hasattr(command, "commands")}
    seen = set()
    for job in jobs(folder, regenerate={"enabled": True}):
        if job.rule.name == "all":
            continue
        command, words = re.match(r"python -m draftsmith ([a-z-]+) (.*)", job.shellcmd, re.S).groups()  # type: ignore[union-attr]
        options = {name for option in commands[command].params for name in option.opts}
        demanded = {
            option.opts[0] for option in commands[command].params if option.required and option.opts[0].startswith("--")
        }
        # Settings are JSON text in quotes, whose words are none of the command's.
        given = set(re.findall(r"(?<=\s)--[a-z-]+", re.sub(r"'[^']*'", "''", f" {words}")))
        assert demanded <= given <= options, command
        seen.add(command)
    # Two are views of a run and no part of it.
    assert seen == set(commands) - {"estimate", "status"}
