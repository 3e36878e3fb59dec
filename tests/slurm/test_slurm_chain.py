"""The whole workflow by `snakemake --profile slurm`, on a real Slurm whose nodes only claim their GPUs and CPUs."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

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
    """The chain has come to its end; every optimiser step of its training took two packs, long enough to be cancelled."""
    folder = tmp_path_factory.mktemp("chain")
    model = tiny.model(folder / "model", num_hidden_layers=4)
    conversations(folder / "conversations.jsonl")
    made = Run(folder, profile="slurm", environment=cluster.environment)
    values = config(folder, model)
    made.write(
        values | {"train": values["train"] | {"packs_per_step": 2, "max_steps": 60, "save_steps": 20, "eval_steps": 20}}
    )
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
    run.environment |= {"DRAFTSMITH_TRAIN_NODES": "2", "DRAFTSMITH_GPUS_PER_NODE": "1"}
    told = run.folder / "logs/tiny/progress/train_draft.counts.json"
    told.unlink(missing_ok=True)
    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(run.snakemake, *only)
        job = wait(lambda: cluster.running("train_draft", before))
        wait(lambda: done.done() or (told.exists() and (json.loads(told.read_text())["done"] or 0) >= 5))
        cluster.ask("scancel", str(job.number))
        done.result()
    first, second = (job for job in cluster.jobs(before) if job.rule == "train_draft")
    assert first.state.startswith("CANCELLED")
    assert second.state == "COMPLETED"
    assert second.node == "gpu[1-2]"
    assert {"gres/gpu=2", "node=2"} <= set(second.tres.split(","))
    together = run.json("train/train.json")
    assert together["world_size"] == 2
    assert 5 <= together["resumed_from"] < 60
    losses = [[entry["eval_loss"] for entry in made["history"] if "eval_loss" in entry] for made in (alone, together)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
