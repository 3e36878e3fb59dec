"""Extraction at TP=8 as Slurm jobs: eight GPUs of one node each, ended in every way that a cluster has, and gone on with.

The GPUs are only claimed, so a stand-in takes vLLM's place (see stand_in/); all else is the product's own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, Job, wait
from test_slurm_chain import SOON

import tiny
from chain import REPO, Run, config, conversations
from draftsmith import store
from environment import shell
from extraction import worst_error

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
STAND_IN = Path(__file__).with_name("stand_in")
MANIFEST = "results/tiny/extract/manifest.json"
ALONE = ("--allowed-rules", "extract_shard", "merge_manifest", "--", MANIFEST)


class Extraction(Run):
    """A run that has come as far as the extraction, once for all tests; each then has a store of its own."""

    def __init__(self, folder: Path, cluster: Cluster, model: Path) -> None:
        paths = os.pathsep.join([str(STAND_IN), cluster.environment["PYTHONPATH"], str(REPO / "workflow")])
        super().__init__(folder, profile="slurm", environment=cluster.environment | {"PYTHONPATH": paths})
        self.cluster, self.model = cluster, model
        self.values = config(folder, model) | {
            "engine": {"tp": 8, "device": "cuda"},
            "preflight": {"dry_run": False},
        }

    def store(self, name: str, **extract: Any) -> Path:
        """Use another store, which is empty; gives its folder."""
        self.write(self.values | {"extract": {"store": str(self.folder / name), "batch_tokens": 512} | extract})
        return self.folder / name

    def begin(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start snakemake as it is typed, in the background."""
        return subprocess.Popen(
            [
                sys.executable, "-m", "snakemake", "-s", str(REPO / "Snakefile"), "-d", str(self.folder), "--profile",
                str(REPO / "profiles/slurm"), "--configfile", str(self.config), *SOON, *arguments,
            ],
            env=shell() | self.environment | environment | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def batches(self, folder: Path) -> set[str]:
        """Names of the batch files that are in a store."""
        return {path.name for path in folder.glob(f"*/*{store.SUFFIX}")}

    def figures(self) -> dict[str, Any]:
        """Of the only shard."""
        return dict(self.json("extract/shards/1-of-1.json")["figures"])


@pytest.fixture(scope="module")
def run(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Extraction:
    """Rows are there; what stands between them and the extraction, test_slurm_chain runs."""
    folder = tmp_path_factory.mktemp("tp8")
    conversations(folder / "conversations.jsonl")
    made = Extraction(
        folder, cluster, tiny.model(folder / "model", num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8)
    )
    made.store("store")
    rows = Run(folder, environment={"PYTHONPATH": str(STAND_IN.with_name("often"))})
    rows.snakemake("--", "results/tiny/tokenize/rows.parquet")
    (folder / "results/tiny/dry_run.json").write_text("{}")
    return made


@pytest.fixture(scope="module")
def three(run: Extraction, cluster: Cluster) -> list[Job]:
    """The jobs of an extraction in three shards."""
    before = cluster.last()
    asked = json.dumps({"seconds": 1.0})
    done = run.begin("--retries", "0", *ALONE, DRAFTSMITH_SHARDS="3", DRAFTSMITH_STAND_IN=asked)
    text = done.communicate()[0]
    assert done.returncode == 0, text[-6000:]
    return cluster.jobs(before)


def test_each_shard_has_eight_gpus_of_one_node_and_the_third_waits(three: list[Job]) -> None:
    """Two nodes: two shards at a time, none beside another; what needs no GPU is on the CPU node."""
    shards = [job for job in three if job.rule == "extract_shard"]
    assert len(shards) == 3
    for job in shards:
        assert job.partition == "gpu"
        assert job.state == "COMPLETED"
        assert "gres/gpu=8," in f"{job.tres},"
        assert "node=1" in job.tres.split(",")
    for node in ("gpu1", "gpu2"):
        here = sorted((job.start, job.end) for job in shards if job.node == node)
        assert here, "nothing ran on " + node
        for (_, end), (start, _) in pairwise(here):
            assert end <= start, here
    assert [(job.node, job.partition) for job in three if job.rule == "merge_manifest"] == [("cpu1", "cpu")]


def test_shards_on_two_nodes_share_a_store(three: list[Job], run: Extraction) -> None:
    """Every row is there once, and right."""
    manifest = run.json("extract/manifest.json")
    seen = [row for shard in range(3) for row in run.json(f"extract/shards/{shard + 1}-of-3.json")["rows"]]
    assert len(seen) == len(set(seen)) == len(manifest["rows"])
    states = store.StoreReader(Path(manifest["store"]), manifest["rows"])
    rows = [states.row(row).token_ids.tolist() for row in list(manifest["rows"])[:4]]
    assert worst_error(tiny.reference(run.model), manifest, rows) < 1e-5


def test_a_failing_job_shows_its_traceback(three: list[Job], run: Extraction, cluster: Cluster) -> None:
    """An assert without a word: the terminal has the worker's traceback, the job's log and its number."""
    run.store("failing", max_engine_starts=1)
    before = cluster.last()
    done = run.begin("--retries", "0", *ALONE, DRAFTSMITH_STAND_IN=json.dumps({"fails": 9}))
    text = done.communicate()[0]
    assert done.returncode != 0
    assert "stand_in_engine.py" in text
    assert "raise AssertionError" in text
    assert "logs/tiny/extract_shard/1-of-1.log" in text
    (job,) = cluster.jobs(before)
    assert job.state == "FAILED"
    assert str(job.number) in text


def test_a_cancelled_job_finishes_its_batch_and_the_retry_goes_on_with_more_time(
    three: list[Job], run: Extraction, cluster: Cluster
) -> None:
    folder, before = run.store("cancelled"), cluster.last()
    begun = run.begin(*ALONE, DRAFTSMITH_STAND_IN=json.dumps({"hangs": 1}))
    wait(lambda: len(run.batches(folder)) == 2)
    first = wait(lambda: cluster.running("extract_shard", before))
    cluster.ask("scancel", str(first.number))
    text = begun.communicate()[0]
    assert begun.returncode == 0, text[-6000:]
    one, two = (job for job in cluster.jobs(before) if job.rule == "extract_shard")
    assert one.state.startswith("CANCELLED")
    assert two.limit == 2 * one.limit
    # The batch that was open when the signal came was finished: the retry found three, and made the others.
    assert run.figures()["batches"] == len(run.batches(folder)) - 3
    assert 0 < run.figures()["reused_rows"] < len(run.json("extract/manifest.json")["rows"])


def test_a_job_over_its_time_limit_and_one_on_a_node_that_dies(
    three: list[Job], run: Extraction, cluster: Cluster
) -> None:
    """The limit is lowered while the job runs; then the retry's node is lost, and Slurm puts the job on the other one."""
    folder, before = run.store("limited"), cluster.last()
    begun = run.begin(*ALONE, DRAFTSMITH_STAND_IN=json.dumps({"hangs": 2}))
    try:
        first = wait(lambda: cluster.running("extract_shard", before))
        cluster.ask("scontrol", "update", f"jobid={first.number}", "timelimit=1")
        second = wait(lambda: cluster.running("extract_shard", first.number), 240)
        wait(lambda: len(run.batches(folder)) == 3 + 2)
        cluster.lab("crash", second.node)
        text = begun.communicate(timeout=400)[0]
    finally:
        begun.send_signal(signal.SIGINT)
        cluster.start()
    assert begun.returncode == 0, text[-6000:]
    jobs = [job for job in cluster.jobs(before) if job.rule == "extract_shard"]
    assert jobs[0].state == "TIMEOUT"
    assert jobs[-1].state == "COMPLETED"
    assert jobs[-1].node != second.node
    assert jobs[-1].limit == 2 * 720
    # Three of the first job, two of the second (the third was lost with its node), the rest of the last.
    assert run.figures()["batches"] == len(run.batches(folder)) - 5
    assert run.figures()["reused_rows"] > 0
