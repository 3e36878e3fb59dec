"""The whole workflow by `snakemake --profile slurm`, on a real Slurm whose nodes only claim their GPUs and CPUs."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cluster import Cluster, Job, wait

import tiny
from chain import Run, config, conversations

pytestmark = [
    pytest.mark.slurm,
    # A dozen jobs, each noticed some seconds late.
    pytest.mark.timeout(1800),
]
# A file system that shows new files at once; the first look at a job after two seconds.
SOON = ("--slurm-init-seconds-before-status-checks", "2", "--latency-wait", "5")


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory, cluster: Cluster) -> tuple[Run, list[Job]]:
    """The chain has come to its end; every optimiser step of its training took two packs."""
    folder = tmp_path_factory.mktemp("chain")
    model = tiny.model(folder / "model", num_hidden_layers=4)
    conversations(folder / "conversations.jsonl")
    made = Run(folder, profile="slurm", environment=cluster.environment)
    values = config(folder, model)
    made.write(values | {"train": values["train"] | {"packs_per_step": 2, "max_steps": 12}})
    before = cluster.last()
    made.snakemake(*SOON)
    return made, cluster.jobs(before)


def test_the_chain_runs_as_slurm_jobs(chain: tuple[Run, list[Job]]) -> None:
    """Every heavy rule is a job; GPU rules land on one GPU node each with the GPUs they asked for, the others on a CPU node."""
    run, listed = chain
    assert run.json("evaluate/evaluate.json")["drafts"] > 0
    jobs = {job.rule: job for job in listed}
    assert {job.state for job in jobs.values()} == {"COMPLETED"}, jobs
    assert {job.account for job in jobs.values()} == {"lab"}
    for rule in ("extract_shard", "evaluate_draft", "train_draft"):
        assert jobs[rule].node in ("gpu1", "gpu2"), jobs[rule]
        assert jobs[rule].partition == "gpu"
        assert "gres/gpu=1," in f"{jobs[rule].tres},"
    for rule in ("tokenize", "map_vocabulary", "report"):
        assert (jobs[rule].node, jobs[rule].partition) == ("cpu1", "cpu"), jobs[rule]
        assert "gpu" not in jobs[rule].tres


def test_training_on_two_nodes_is_the_same_training_and_resumes(chain: tuple[Run, list[Job]], cluster: Cluster) -> None:
    """By srun and torchrun: cancelled after some steps it saves, and the retry comes to what one process comes to."""
    run, _ = chain
    only = (*SOON, "--allowed-rules", "train_draft", "--", "results/tiny/train/train.json")
    alone = run.json("train/train.json")
    (run.folder / "results/tiny/train/train.json").unlink()
    shutil.rmtree(run.folder / "work/tiny/train")
    before = cluster.last()
    let_go = run.folder / "let-go"
    run.environment |= {
        "DRAFTSMITH_TRAIN_NODES": "2", "DRAFTSMITH_GPUS_PER_NODE": "1", "DRAFTSMITH_LET_GO": str(let_go),
        "PYTHONPATH": str(Path(__file__).with_name("held")),
    }  # fmt: skip
    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(run.snakemake, *only)
        job = wait(lambda: cluster.running("train_draft", before))
        wait(lambda: done.done() or let_go.with_suffix(".held").exists())
        cluster.ask("scancel", str(job.number))
        wait(lambda: getattr(cluster.running("train_draft", before), "number", 0) != job.number)
        let_go.touch()
        done.result()
    first, second = (job for job in cluster.jobs(before) if job.rule == "train_draft")
    assert first.state.startswith("CANCELLED")
    assert second.state == "COMPLETED"
    assert second.node == "gpu[1-2]"
    assert {"gres/gpu=2", "node=2"} <= set(second.tres.split(","))
    together = run.json("train/train.json")
    assert together["world_size"] == 2
    # The step that was begun when the signal came was finished.
    assert together["resumed_from"] == 6
    # What was validated before the stop is in the one's history and need not be in the other's.
    losses, wanted = (
        {entry["step"]: entry["eval_loss"] for entry in made["history"] if "eval_loss" in entry}
        for made in (together, alone)
    )
    shared = losses.keys() & wanted.keys()
    assert {9, 12} <= shared
    assert {step: losses[step] for step in shared} == pytest.approx({step: wanted[step] for step in shared}, rel=1e-5)
