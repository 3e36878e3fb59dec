"""The whole workflow by `snakemake --profile slurm`, on a real Slurm whose nodes only claim their GPUs and CPUs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import tiny
from chain import Run, config, conversations

LAB = Path(__file__).with_name("slurm-lab")

pytestmark = [
    pytest.mark.slurm,
    # A dozen jobs, each noticed some seconds late.
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("apt-get") is None, reason="the Slurm cluster for tests needs root on Debian"
    ),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A Slurm with two nodes of eight GPUs and one without; its environment."""
    # The path holds sockets, so it has to be short.
    folder = Path(f"/tmp/draftsmith-slurm-{os.getpid()}")
    environment = os.environ | {"SLURM_LAB_DIR": str(folder), "SLURM_LAB_PORT": "17400"}
    try:
        subprocess.run([LAB, "start"], check=True, env=environment, stdin=subprocess.DEVNULL)
        yield environment | {"SLURM_CONF": str(folder / "etc/slurm.conf"), "DRAFTSMITH_ACCOUNT": "lab"}
    finally:
        subprocess.run([LAB, "stop", "--purge"], env=environment, stdin=subprocess.DEVNULL, check=False)


def accounted(environment: dict[str, str]) -> dict[str, str]:
    """For each rule: node list and granted resources, from sacct."""
    text = subprocess.run(
        ["sacct", "-X", "-n", "-P", "-S", "now-1hour", "-o", "Comment,NodeList,AllocTRES,State"],
        env=environment, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    return {match[1]: match[2] for match in re.finditer(r"^rule_(\w+?)(?:_wildcards_[^|]*)?\|(.*)$", text, re.M)}


def test_the_chain_runs_as_slurm_jobs(tmp_path: Path, cluster: dict[str, str]) -> None:
    """Every heavy rule is a job; GPU rules land on one GPU node each with the GPUs they asked for, the others on a CPU node."""
    model = tiny.model(tmp_path / "model", num_hidden_layers=4)
    conversations(tmp_path / "conversations.jsonl")
    run = Run(tmp_path, profile="slurm", environment=cluster)
    run.write(config(tmp_path, model))
    run.snakemake(
        "--slurm-init-seconds-before-status-checks", "2", "--seconds-between-status-checks", "2", "--latency-wait", "5"
    )
    assert run.json("evaluate/evaluate.json")["drafts"] > 0
    jobs = accounted(cluster)
    assert re.match(r"gpu\d\|.*gres/gpu=1\b.*\|COMPLETED", jobs["extract_shard"]), jobs
    assert re.match(r"gpu\d\|.*gres/gpu=1\b", jobs["evaluate_draft"]), jobs
    assert re.match(r"cpu1\|(?!.*gres/gpu)", jobs["tokenize"]), jobs
