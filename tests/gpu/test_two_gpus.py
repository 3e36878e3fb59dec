"""The training on two GPUs, over NCCL, beside the same on one. `pytest -m gpu tests/gpu`; needs two."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import training_run
from draftsmith.files import read_json

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")]

# Products in float32 tell a difference of the two; rows, as flex wants wider heads than these of 8.
EXACT = {"dtype": "float32", "attention": "rows", "compile": False, "max_steps": 6, "eval_steps": 3}


def command(run: training_run.RunFolder, out: str, workdir: str, train: dict[str, Any]) -> list[str]:
    settings = run.config(**train).model_dump_json()
    given = [(f"--{name}", str(path)) for name, path in run.paths(out, workdir).items()]
    return [
        sys.executable,
        "-m",
        "draftsmith",
        "train-draft",
        "--settings",
        settings,
        *(w for pair in given for w in pair),
    ]


def trained(run: training_run.RunFolder, gpus: str, out: str, workdir: str = "", **train: Any) -> dict[str, Any]:
    done = subprocess.run(
        command(run, out, workdir or f"work-{out}", train), env=os.environ | {"CUDA_VISIBLE_DEVICES": gpus},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    return dict(read_json(run.folder / out / "train.json"))


@pytest.mark.parametrize(
    ("train", "close"),
    [
        (EXACT, 1e-4),
        (EXACT | {"fsdp": True}, 1e-4),
        (EXACT | {"packs_per_step": 3}, 1e-4),
        (EXACT | {"dtype": "bfloat16", "attention": "flash"}, 2e-2),
    ],
    ids=["ddp", "fsdp", "uneven", "flash"],
)
def test_two_gpus_train_as_one(train: dict[str, Any], close: float, tmp_path: Path) -> None:
    """The same packs and losses, step by step, and the same draft; with three packs a step the second GPU has one and an empty one."""
    run = training_run.make(tmp_path)
    two = trained(run, "0,1", "two", **train)
    one = trained(run, "0", "one", **({"packs_per_step": 2} | train))
    assert (two["world_size"], one["world_size"]) == (2, 1)
    assert two["packs_per_step"] == one["packs_per_step"]
    assert two["tokens"] == one["tokens"]
    for found, expected in zip(two["history"], one["history"], strict=True):
        for what in ("loss", "eval_loss", "eval_acceptance_length"):
            if what in expected:
                assert found[what] == pytest.approx(expected[what], rel=close, abs=close), what
    drafts = [load_file(run.folder / name / "draft.safetensors") for name in ("two", "one")]
    for name, tensor in drafts[1].items():
        torch.testing.assert_close(drafts[0][name], tensor, atol=10 * close, rtol=10 * close, msg=name)


def test_a_kill_on_two_gpus_is_resumed(tmp_path: Path) -> None:
    """300 steps straight equal some, kill -9, resume, the rest: in loss, to 1e-6."""
    run = training_run.make(tmp_path)
    settings = EXACT | {"epochs": 100, "max_steps": 300, "save_steps": 50, "eval_steps": 300}
    straight = trained(run, "0,1", "straight", **settings)
    process = subprocess.Popen(
        command(run, "killed", "work-killed", settings), env=os.environ | {"CUDA_VISIBLE_DEVICES": "0,1"},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 200
    while not run.checkpoints("work-killed") and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    resumed = trained(run, "0,1", "killed", "work-killed", **settings)
    assert 50 <= resumed["resumed_from"] < 300
    losses, expected = ([entry["loss"] for entry in each["history"] if "loss" in entry] for each in (resumed, straight))
    assert len(losses) == 300
    assert losses == pytest.approx(expected, rel=1e-6, abs=1e-6)
