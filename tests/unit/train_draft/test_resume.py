"""A process that is killed, a disk that is full, the last step."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftsmith import train_draft
from draftsmith.config import Config
from draftsmith.errors import DraftsmithError
from draftsmith.train_draft import checkpoints
from draftsmith.train_draft import trainer as trainer_module
from draftsmith.train_draft.trainer import DraftTrainer
from training_run import files_end_at

Make = Callable[..., Any]


def _record(seen: Path, kill_at: int | None = None) -> Callable[..., Any]:
    """A collate that notes the rows of every pack in ``seen``, and kills its process at one."""
    collate = trainer_module.collate

    def recording(examples: Any, steps: int, **how: Any) -> Any:
        with open(seen, "a") as file:
            file.write(" ".join(example.row.row_id for example in examples) + "\n")
        if kill_at is not None and len(seen.read_text().splitlines()) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return collate(examples, steps, **how)

    return recording


def _train_until_killed(config: Config, paths: dict[str, Path], seen: Path, kill_at: int) -> None:
    trainer_module.collate = _record(seen, kill_at)
    train_draft.run(config, **paths)


def test_five_steps_kill_and_five_more_equal_ten(make_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """kill -9 while pack 8 is read, after the checkpoint of step 5: losses, weights and the order of rows are as without it."""
    run = make_run(validation=0)
    settings = {"max_steps": 10}
    orders = {name: run.folder / f"{name}.txt" for name in ("whole", "killed", "resumed")}
    process = multiprocessing.get_context("spawn").Process(
        target=_train_until_killed, args=(run.config(**settings), run.paths("parts", "work-parts"), orders["killed"], 8)
    )
    process.start()
    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "collate", _record(orders["whole"]))
        whole = run.train("whole", "work-whole", **settings)
    process.join(300)
    assert process.exitcode == -signal.SIGKILL
    assert [path.name for path in run.checkpoints("work-parts")] == ["checkpoint-5"]
    assert not (run.folder / "parts").exists()
    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "collate", _record(orders["resumed"]))
        parts = run.train("parts", "work-parts", **settings)
    assert parts["resumed_from"] == 5
    order = {name: path.read_text().splitlines() for name, path in orders.items()}
    assert order["killed"][:5] + order["resumed"] == order["whole"]
    assert [entry["step"] for entry in parts["history"]] == list(range(1, 11))
    for one, other in zip(parts["history"], whole["history"], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-6)
    expected = load_file(run.folder / "whole" / "draft.safetensors")
    for name, tensor in load_file(run.folder / "parts" / "draft.safetensors").items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=1e-6, msg=name)


@pytest.mark.parametrize("share", [0.5, 1.5], ids=["in the weights", "in the moments"])
def test_full_disk_costs_no_finished_checkpoint(share: float, make_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 10 cannot be saved: one sentence, checkpoint 5 as it was, and the next run goes on from it."""
    run = make_run(validation=0)
    whole = run.train("whole", "work-whole", max_steps=10)
    save = DraftTrainer._save_checkpoint

    def save_with_little_room(self: DraftTrainer, *args: Any) -> None:
        if self.state.global_step < 10:
            save(self, *args)
        else:
            with files_end_at(int(4 * whole["params"] * share)):
                save(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(DraftTrainer, "_save_checkpoint", save_with_little_room)
        with pytest.raises(DraftsmithError) as raised:
            run.train(max_steps=10)
    sentence = str(raised.value)
    assert "\n" not in sentence
    assert "by step 10 could not be written" in sentence
    assert "make room there" in sentence
    assert sentence.endswith("the same command goes on from step 5")
    (kept,) = run.checkpoints()
    assert (kept.name, checkpoints.fault(kept)) == ("checkpoint-5", None)
    assert not (kept.parent / checkpoints.STAGING).exists()
    report = run.train(max_steps=10)
    assert report["resumed_from"] == 5
    assert report["history"][-1]["loss"] == pytest.approx(whole["history"][-1]["loss"], abs=1e-6)


def test_other_errors_while_saving_are_not_taken_for_a_full_disk(
    make_run: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(checkpoints, "publish", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        make_run(validation=0).train(max_steps=5)


def test_the_last_step_is_saved_whatever_save_steps_is(make_run: Make) -> None:
    run = make_run(validation=0)
    run.train(max_steps=7, save_steps=5)
    assert [path.name for path in run.checkpoints()] == ["checkpoint-5", "checkpoint-7"]


def test_a_damaged_checkpoint_is_told_and_the_one_before_used(
    make_run: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(validation=0)
    whole = run.train(max_steps=10)
    newest = run.checkpoints()[-1] / "optimizer.pt"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    shutil.rmtree(run.folder / "out")
    again = run.train(max_steps=10)
    assert again["resumed_from"] == 5
    assert again["history"][-1]["loss"] == pytest.approx(whole["history"][-1]["loss"], abs=1e-6)
    lines = [line for line in capsys.readouterr().err.splitlines() if "checkpoint-10" in line]
    assert len(lines) == 1
    assert "optimizer.pt does not have its checksum; it is removed, and the checkpoint before it is used" in lines[0]
