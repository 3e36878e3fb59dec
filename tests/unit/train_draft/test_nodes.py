"""Training on several nodes: what srun and torchrun are called with; on a real Slurm it runs in tests/slurm."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from draftsmith import hardware
from draftsmith.errors import DraftsmithError
from draftsmith.train_draft import nodes


def srun(folder: Path, then: str) -> None:
    """An srun that notes what it was called with."""
    script = folder / "srun"
    script.write_text(f'#!/bin/sh\nprintf \'%s\\n\' "$DRAFTSMITH_ON_NODE" "$@" > {folder}/called\n{then}\n')
    script.chmod(0o755)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In a Slurm job, whose srun is to be written into the folder given."""
    monkeypatch.setenv("SLURM_JOB_ID", "40017")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sys, "argv", ["draftsmith", "train-draft", "--nodes", "2"])
    return tmp_path


def test_gpus_are_shared_out_evenly_or_not_at_all() -> None:
    assert [nodes.per_node(*given) for given in ((16, 2), (8, 1), (0, 2), (None, 4))] == [8, 8, 0, None]
    with pytest.raises(DraftsmithError, match="9 GPUs cannot be shared out evenly over 2 nodes; make the resource gpu"):
        nodes.per_node(9, 2)


def test_the_command_runs_once_on_each_node_with_its_gpus(job: Path) -> None:
    srun(job, "exit 0")
    nodes.run_on_nodes(2, 8)
    assert (job / "called").read_text().splitlines() == [
        "1", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpu-bind=none", "--kill-on-bad-exit=1", "--gres=gpu:8",
        sys.executable, "-m", "draftsmith", "train-draft", "--nodes", "2",
    ]  # fmt: skip


def test_a_node_that_fails_fails_the_stage(job: Path) -> None:
    srun(job, "exit 7")
    with pytest.raises(DraftsmithError, match=r"training on 2 nodes failed \(srun ended with 7\)"):
        nodes.run_on_nodes(2, 0)
    assert "--gres" not in (job / "called").read_text()


def test_sigterm_reaches_the_nodes_and_is_what_the_stage_ends_with(job: Path) -> None:
    srun(job, f"trap 'touch {job}/told; exit 143' TERM\ntouch {job}/up\nwhile :; do sleep 0.05; done")

    def ask() -> None:
        while not (job / "up").exists():
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask).start()
    with pytest.raises(SystemExit) as ended:
        nodes.run_on_nodes(2, 0)
    assert ended.value.code == 143
    assert (job / "told").exists()


@pytest.mark.parametrize(
    ("variable", "lacks"), [("SLURM_JOB_ID", "SLURM_JOB_ID is not set"), ("PATH", "srun is not on")]
)
def test_without_a_slurm_job_the_mend_is_named(
    job: Path, monkeypatch: pytest.MonkeyPatch, variable: str, lacks: str
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID") if variable == "SLURM_JOB_ID" else monkeypatch.setenv("PATH", str(job))
    with pytest.raises(DraftsmithError, match=f"needs a Slurm job, and {lacks}.*leave --nodes at 1"):
        nodes.run_on_nodes(2, 8)


def test_a_node_becomes_torchrun(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process a GPU; all nodes meet where srun was called, at a port of this job's own."""
    called: list[list[str]] = []
    monkeypatch.setattr(nodes.os, "execv", lambda _, arguments: called.append(arguments))
    monkeypatch.setattr(hardware, "gpus", lambda: [object()] * 4)
    monkeypatch.setattr(hardware, "cores", lambda: list(range(64)))
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "10.1.2.3")
    monkeypatch.setenv("OMP_NUM_THREADS", "x")
    monkeypatch.delenv("OMP_NUM_THREADS")
    nodes.become_torchrun(2)
    assert called == [[
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=4", "--rdzv-backend=c10d",
        "--rdzv-endpoint=10.1.2.3:15017", "--rdzv-id=40017", "--max-restarts=0", "-m", "draftsmith", "train-draft", "--nodes", "2",
    ]]  # fmt: skip
    assert os.environ["OMP_NUM_THREADS"] == "16"
