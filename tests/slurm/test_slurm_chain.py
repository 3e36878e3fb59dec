"""The whole workflow by `snakemake --profile slurm`, on a real Slurm whose nodes only claim their GPUs and CPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import Cluster

import tiny
from chain import Run, config, conversations

pytestmark = [
    pytest.mark.slurm,
    # A dozen jobs, each noticed some seconds late.
    pytest.mark.timeout(1800),
]
# A file system that shows new files at once; the first look at a job after two seconds.
SOON = ("--slurm-init-seconds-before-status-checks", "2", "--latency-wait", "5")


def test_the_chain_runs_as_slurm_jobs(tmp_path: Path, cluster: Cluster) -> None:
    """Every heavy rule is a job; GPU rules land on one GPU node each with the GPUs they asked for, the others on a CPU node."""
    model = tiny.model(tmp_path / "model", num_hidden_layers=4)
    conversations(tmp_path / "conversations.jsonl")
    run = Run(tmp_path, profile="slurm", environment=cluster.environment)
    run.write(config(tmp_path, model))
    before = cluster.last()
    run.snakemake(*SOON)
    assert run.json("evaluate/evaluate.json")["drafts"] > 0
    jobs = {job.rule: job for job in cluster.jobs(before)}
    assert {job.state for job in jobs.values()} == {"COMPLETED"}, jobs
    assert {job.account for job in jobs.values()} == {"lab"}
    for rule in ("extract_shard", "evaluate_draft", "train_draft"):
        assert jobs[rule].node in ("gpu1", "gpu2"), jobs[rule]
        assert jobs[rule].partition == "gpu"
        assert "gres/gpu=1," in f"{jobs[rule].tres},"
    for rule in ("tokenize", "map_vocabulary", "report"):
        assert (jobs[rule].node, jobs[rule].partition) == ("cpu1", "cpu"), jobs[rule]
        assert "gpu" not in jobs[rule].tres
