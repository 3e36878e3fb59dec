"""What may change before a training goes on, checkpoints that are not its own, and the best draft across a kill."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.draft.metrics import Tally
from draftsmith.errors import DraftsmithError
from draftsmith.train_draft import best_draft, checkpoints, outcome
from draftsmith.train_draft.trainer import DraftTrainer
from training_run import files_end_at

Make = Callable[..., Any]


def _remove_after(run: Any, step: int) -> None:
    for path in run.checkpoints():
        if checkpoints.step_of(path) > step:
            shutil.rmtree(path)


def test_steps_between_reports_are_those_that_are_set_now(make_run: Make) -> None:
    run = make_run()
    settings = {"max_steps": 12, "save_total_limit": 10}
    every = run.train("every", "work-every", **settings | {"save_steps": 12, "eval_steps": 12})
    run.train(**settings | {"logging_steps": 3, "save_steps": 4, "eval_steps": 4})
    _remove_after(run, 4)
    report = run.train("again", **settings | {"logging_steps": 2, "save_steps": 3, "eval_steps": 5})
    assert report["resumed_from"] == 4
    later = [entry for entry in report["history"] if entry["step"] > 4]
    assert [entry["step"] for entry in later if "loss" in entry] == [6, 8, 10, 12]
    assert [entry["step"] for entry in later if "eval_loss" in entry] == [5, 10, 12]
    assert [checkpoints.step_of(path) for path in run.checkpoints()] == [4, 6, 9, 12]
    single = {entry["step"]: entry for entry in every["history"]}
    for entry in later:
        if "loss" in entry:
            assert entry["accuracy"] == single[entry["step"]]["accuracy"]


def _edit_mark(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    mark = json.loads((checkpoint / "complete.json").read_text())
    change(mark)
    (checkpoint / "complete.json").write_text(json.dumps(mark))


def test_a_checkpoint_of_another_training_is_passed_over(make_run: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(validation=0)
    first = run.train(max_steps=6)
    other = run.train("other", "work-other", max_steps=8, seed=7)
    folder = run.checkpoints()[0].parent
    noted = checkpoints.notes(folder / "checkpoint-6")
    assert (noted["fingerprint"], noted["step"]) == (folder.name, 6)
    # Higher than the own newest, below and beyond the plan's end.
    shutil.copytree(run.checkpoints("work-other")[-1], folder / "checkpoint-8")
    shutil.rmtree(folder / "checkpoint-6")
    report = run.train("again", max_steps=6)
    assert report["resumed_from"] == 5
    assert report["history"][-1]["loss"] == pytest.approx(first["history"][-1]["loss"], abs=1e-6)
    said = capsys.readouterr().err
    assert f"checkpoint-8: it is of another training ({other['fingerprint']}); it is passed over and left alone" in said
    assert (folder / "checkpoint-8").exists()

    # One of an older version names neither, but is beyond the plan.
    def age(mark: dict[str, Any]) -> None:
        del mark["notes"]["fingerprint"], mark["notes"]["step"]

    _edit_mark(folder / "checkpoint-8", age)
    _edit_mark(folder / "checkpoint-6", age)
    assert run.train("third", max_steps=6)["resumed_from"] == 6
    said = capsys.readouterr().err
    assert "checkpoint-8: this training has 6 steps, so it is another training's" in said
    assert "resuming from step 6 of 6" in said
    # Without notes there is nothing to go on from: the one before it is used.
    _edit_mark(folder / "checkpoint-6", lambda mark: mark.pop("notes"))
    assert run.train("fourth", max_steps=6)["resumed_from"] == 5
    assert "checkpoint-6: complete.json has no notes; it is passed over and left alone" in capsys.readouterr().err


def test_an_old_checkpoint_of_another_shape_is_one_sentence(make_run: Make) -> None:
    run = make_run(validation=0)
    run.train(max_steps=6)
    run.train("other", "work-other", max_steps=6, intermediate_size=64)
    folder = run.checkpoints()[0].parent
    shutil.rmtree(folder / "checkpoint-6")
    shutil.copytree(run.checkpoints("work-other")[-1], folder / "checkpoint-6")
    _edit_mark(folder / "checkpoint-6", lambda mark: mark["notes"].pop("fingerprint"))
    with pytest.raises(
        DraftsmithError,
        match=r"checkpoint-6: .*down_proj.* \[32, 64\] there and \[32, 48\] .*move it to another folder",
    ):
        run.train("again", max_steps=6)
    assert (folder / "checkpoint-6").exists()


def test_the_best_draft_outlives_a_better_one_that_no_checkpoint_knows(
    make_run: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 2 is the best when step 4 is saved; step 6 is better, and the process ends; the next one finds step 6 worse."""
    run = make_run()
    settings = {"max_steps": 8, "eval_steps": 2, "save_steps": 4}
    lengths = iter([1.0, 2.0, 1.5, 3.0])
    drafts: list[dict[str, torch.Tensor]] = []
    evaluate = DraftTrainer.evaluate

    def killed(self: DraftTrainer, *args: Any, **kwargs: Any) -> Any:
        drafts.append({name: tensor.clone() for name, tensor in self.objective.draft.state_dict().items()})
        found = evaluate(self, *args, **kwargs)
        if self.state.global_step == 6:
            raise KeyboardInterrupt
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Tally, "acceptance_length", lambda _: next(lengths))
        patch.setattr(DraftTrainer, "evaluate", killed)
        with pytest.raises(KeyboardInterrupt):
            run.train(**settings)
    (checkpoint,) = run.checkpoints()
    assert checkpoint.name == "checkpoint-4"
    assert sorted(path.name for path in checkpoint.parent.glob("best*")) == ["best-2.safetensors", "best-6.safetensors"]
    monkeypatch.setattr(Tally, "acceptance_length", lambda _: 1.0)
    report = run.train(**settings)
    assert (report["resumed_from"], report["best"]["step"], report["simulated_acceptance_length"]) == (4, 2, 2.0)
    written = load_file(run.folder / "out" / "draft.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in drafts[1].items())
    assert sorted(path.name for path in checkpoint.parent.glob("best*")) == ["best-2.safetensors"]


def test_a_flipped_byte_is_noticed(tmp_path: Path) -> None:
    weights = {"fc.weight": torch.arange(6.0).view(2, 3), "norm.weight": torch.ones(3)}
    best_draft.keep(weights, tmp_path, 7)
    found = best_draft.read(tmp_path, 7)
    assert found is not None
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    assert best_draft.read(tmp_path, 8) is None
    path = best_draft.path_of(tmp_path, 7)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert best_draft.read(tmp_path, 7) is None


def test_the_best_draft_of_an_older_version_is_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "best.safetensors", metadata={"format": "pt", "step": "5"})
    assert best_draft.read(tmp_path, 6) is None
    found = best_draft.read(tmp_path, 5)
    assert found is not None
    assert found["a"].tolist() == [1.0, 1.0]
    best_draft.forget(tmp_path, 5)
    assert (tmp_path / "best.safetensors").exists()
    best_draft.forget(tmp_path, 6)
    assert not (tmp_path / "best.safetensors").exists()


@pytest.mark.parametrize("kind", ["flash", "flex"])
def test_kernels_of_a_gpu_give_way_on_a_cpu(kind: str, make_run: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(validation=0)
    expected = run.train("rows", "work-rows", max_steps=2, attention="rows")
    assert "needs a GPU" not in capsys.readouterr().err
    report = run.train(max_steps=2, attention=kind)
    assert capsys.readouterr().err.count(f"train.attention: {kind} needs a GPU") == 1
    assert [entry["loss"] for entry in report["history"]] == [entry["loss"] for entry in expected["history"]]


def test_a_step_of_the_whole_training_is_told(make_run: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(validation=0)
    report = run.train(epochs=1, packs_per_step=50)
    assert report["steps"] == 1
    said = capsys.readouterr().err
    assert "train.packs_per_step: 50 packs are one step" in said
    assert "lower train.packs_per_step" in said
    run.train("two", "work-two", epochs=1, packs_per_step=2)
    assert "packs are one step" not in capsys.readouterr().err


@pytest.mark.parametrize("share", [0.5, None], ids=["draft", "report"])
def test_a_disk_that_is_full_at_the_end_costs_no_checkpoint(
    share: float | None, make_run: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(validation=0)
    write = outcome.write

    def with_little_room(*args: Any, **kwargs: Any) -> None:
        # The report is smaller than the draft, so only its own file is limited.
        if share is None:
            monkeypatch.setattr(outcome, "write_json", _write_nothing(outcome.write_json))
            write(*args, **kwargs)
        else:
            with files_end_at(int(4 * kwargs["params"] * share)):
                write(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(outcome, "write", with_little_room)
        with pytest.raises(DraftsmithError) as raised:
            run.train(max_steps=5)
    monkeypatch.undo()
    said = str(raised.value)
    assert "\n" not in said
    assert str(run.folder / "out" / ("train.json" if share is None else "draft.safetensors")) in said
    assert said.endswith("the same command goes on from step 5")
    (kept,) = run.checkpoints()
    assert checkpoints.fault(kept) is None
    assert run.train(max_steps=5)["resumed_from"] == 5


def _write_nothing(write: Callable[..., None]) -> Callable[..., None]:
    def limited(path: Path, value: Any) -> None:
        with files_end_at(1):
            write(path, value)

    return limited
