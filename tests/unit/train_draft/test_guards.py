"""Losses that are no number, trainings that no longer improve, and which draft is kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from draftsmith.errors import DraftsmithError
from draftsmith.train_draft import judge
from draftsmith.train_draft.guard import Guard
from draftsmith.train_draft.outcome import history_of
from draftsmith.train_draft.plan import make_plan
from draftsmith.train_draft.trainer import DraftTrainer

Make = Callable[..., Any]
NAN = torch.tensor(float("nan"))


def _pack(*rows: str) -> Any:
    """Two slots a row, one that counts; states are numbers."""
    count = len(rows)
    return SimpleNamespace(
        row_ids=list(rows),
        widths=[2] * count,
        counted=[1] * count,
        aux=torch.ones(2 * count, 3),
        final=torch.ones(count, 3),
    )


def _step(model: nn.Module, optimiser: torch.optim.Optimizer, value: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    optimiser.step()


def test_a_step_left_out_changes_neither_weights_nor_moments() -> None:
    model = nn.Linear(3, 2)
    optimiser = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    _step(model, optimiser, 1.0)
    before = json.dumps([tensor.tolist() for tensor in model.parameters()])
    moments = str(optimiser.state_dict())
    guard = Guard("skip")
    assert not guard.look_at_loss(_pack("a", "b"), NAN)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    guard.look_at_gradient(NAN, model, step=7)
    optimiser.step()
    assert json.dumps([tensor.tolist() for tensor in model.parameters()]) == before
    assert str(optimiser.state_dict()) == moments
    assert guard.skipped == [{"step": 7, "rows": ["a", "b"]}]


def test_rows_with_bad_states_are_named_alone() -> None:
    guard = Guard("stop")
    pack = _pack("good", "bad", "worse")
    pack.aux[3, 0], pack.final[2, 1] = float("nan"), float("inf")
    assert not guard.look_at_loss(pack, NAN)
    assert guard.look_at_loss(_pack("other"), torch.tensor(1.0))
    with pytest.raises(
        DraftsmithError,
        match=r"stored states of these rows are not finite: bad, worse; move their batch files, .*--forcerun extract_shard, .*on_bad_loss: skip",
    ):
        guard.look_at_gradient(NAN, nn.Linear(1, 1), step=3)


def test_an_endless_gradient_of_a_finite_loss_counts_too() -> None:
    guard = Guard("skip")
    assert guard.look_at_loss(_pack("a"), torch.tensor(1e30))
    assert guard.look_at_loss(_pack("b"), torch.tensor(2.0))
    guard.look_at_gradient(torch.tensor(float("inf")), nn.Linear(1, 1), step=4)
    assert guard.skipped == [{"step": 4, "rows": ["a", "b"]}]


def test_rows_of_good_steps_are_not_remembered() -> None:
    guard = Guard("skip")
    guard.look_at_loss(_pack("early"), torch.tensor(1.0))
    guard.look_at_gradient(torch.tensor(2.0), nn.Linear(1, 1), step=1)
    guard.look_at_loss(_pack("late"), NAN)
    guard.look_at_gradient(NAN, nn.Linear(1, 1), step=2)
    assert guard.skipped == [{"step": 2, "rows": ["late"]}]


def test_a_draft_that_has_diverged_is_not_skipped_for_ever() -> None:
    guard = Guard("skip")
    for step in range(1, 10):
        guard.look_at_gradient(NAN, nn.Linear(1, 1), step)
    with pytest.raises(DraftsmithError, match="10 steps in a row"):
        guard.look_at_gradient(NAN, nn.Linear(1, 1), 10)


def test_ten_steps_with_bad_states_are_not_called_a_diverged_draft() -> None:
    guard = Guard("skip")
    bad = _pack("good", "bad")
    bad.aux[2, 0] = float("nan")
    for step in range(1, 11):
        assert not guard.look_at_loss(bad, NAN)
        if step < 10:
            assert not guard.look_at_gradient(NAN, nn.Linear(1, 1), step)
    with pytest.raises(DraftsmithError, match=r"these rows are not finite: bad; .*; 10 steps in a row were left out$"):
        guard.look_at_gradient(NAN, nn.Linear(1, 1), 10)


def test_a_draft_that_diverged_is_told_though_the_last_step_had_a_bad_row() -> None:
    guard = Guard("skip")
    for step in range(1, 10):
        guard.look_at_loss(_pack("sound"), NAN)
        guard.look_at_gradient(NAN, nn.Linear(1, 1), step)
    bad = _pack("bad")
    bad.final[0, 0] = float("nan")
    guard.look_at_loss(bad, NAN)
    with pytest.raises(DraftsmithError, match=r"rows are not finite: bad; .*not all of them for such rows: .*diverged"):
        guard.look_at_gradient(NAN, nn.Linear(1, 1), 10)


def test_training_goes_on_without_a_bad_row_and_counts(make_run: Make, capsys: pytest.CaptureFixture[str]) -> None:
    """Row 4 of 16 has a NaN: in each of two passes the step of its pack is left out, and nothing else is touched."""

    def poison(number: int, aux: torch.Tensor, final: torch.Tensor) -> None:
        if number == 4:
            aux[2, 0, 0] = float("nan")

    run = make_run(edit=poison)
    report = run.train(epochs=2, on_bad_loss="skip")
    assert [entry["rows"] for entry in report["skipped"]] == [[run.row_ids[4]]] * 2
    skipped = {entry["step"] for entry in report["skipped"]}
    assert len(skipped) == 2
    assert all("grad_norm" in entry for entry in report["history"] if entry["step"] not in skipped | {0})
    # A step that was left out has no figures of its own, not a loss of nothing.
    for figure in ("grad_norm", "loss", "accuracy"):
        assert not any(figure in entry for entry in report["history"] if entry["step"] in skipped)
        assert all(figure in entry for entry in report["history"] if entry["step"] not in skipped | {0})
    weights = load_file(run.folder / "out" / "draft.safetensors")
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights.values())
    lines = capsys.readouterr().err
    assert lines.count("the step is left out") == 2
    assert lines.count("  left out  lr ") == 2
    assert "loss 0.0000" not in lines
    # A mean of two steps, one of which was left out, is the other's loss.
    losses = {entry["step"]: entry["loss"] for entry in report["history"] if "loss" in entry}
    pairs = run.train("pairs", "work-pairs", epochs=2, on_bad_loss="skip", logging_steps=2)
    means = {entry["step"]: entry["loss"] for entry in pairs["history"] if "loss" in entry and entry["step"] > 2}
    assert sum(len({step - 1, step} & skipped) for step in means) == 2
    for step, mean in means.items():
        kept = [losses[one] for one in (step - 1, step) if one in losses]
        assert mean == pytest.approx(sum(kept) / len(kept), rel=1e-5)
    # A resumed training still knows of them.
    assert run.train(epochs=2, on_bad_loss="skip")["skipped"] == report["skipped"]


def _entry(step: int, length: float, loss: float) -> dict[str, Any]:
    return {"step": step, "eval_acceptance_length": length, "eval_loss": loss}


def test_the_best_is_the_longest_and_then_the_lowest() -> None:
    history = [
        _entry(0, 1.0, 9.0),
        {"step": 3, "loss": 1.0},
        _entry(5, 1.8, 3.0),
        _entry(10, 1.7, 1.0),
        _entry(15, 1.8, 2.0),
    ]
    assert judge.best(history) == history[-1]
    assert judge.best(history[:4]) == history[2]
    assert judge.best([]) is None


def test_a_validation_without_a_finite_loss_is_none() -> None:
    """As an older version logged it: NaN, or nothing once it had been written as JSON, beside a length that means nothing."""
    sound, longer = _entry(5, 1.8, 3.0), {"step": 10, "eval_acceptance_length": 2.9}
    history = [sound, _entry(15, 3.0, float("nan")), longer, _entry(20, float("nan"), 1.0), _entry(25, 1.7, 2.0)]
    assert judge.best(history) == sound
    assert not judge.exhausted(history, 2)
    assert judge.exhausted(history, 1)
    assert judge.best(history[1:4]) is None
    plan = make_plan([4] * 6, 4, seed=0, epochs=5, max_steps=None, group=1)
    told = history_of(history, plan)
    assert [(entry["step"], entry["eval_loss"]) for entry in told] == [(5, 3.0), (20, 1.0), (25, 2.0)]
    assert judge.best(told)["step"] == 5


def test_patience_counts_validations_after_the_best() -> None:
    history = [_entry(0, 1.0, 9.0), _entry(5, 1.8, 3.0), _entry(10, 1.7, 1.0), _entry(15, 1.6, 2.0)]
    assert judge.exhausted(history, 2)
    assert not judge.exhausted(history, 3)
    assert not judge.exhausted(history, None)
    # The same step, validated once more by a resumed run, is one validation.
    assert not judge.exhausted([*history[:3], _entry(10, 1.7, 1.0)], 2)


def test_the_best_draft_is_exported_and_training_stops_early(make_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A learning rate that ruins the draft: what is written is the draft of the best validation, not the last one's."""
    drafts: dict[int, dict[str, torch.Tensor]] = {}
    evaluate = DraftTrainer.evaluate

    def spy(self: DraftTrainer, *args: Any, **kwargs: Any) -> Any:
        drafts[self.state.global_step] = {
            name: tensor.clone() for name, tensor in self.objective.draft.state_dict().items()
        }
        return evaluate(self, *args, **kwargs)

    monkeypatch.setattr(DraftTrainer, "evaluate", spy)
    run = make_run()
    settings = {
        "epochs": 10, "eval_steps": 2, "learning_rate": 0.3, "schedule": "constant_with_warmup", "early_stopping_patience": 2,
        "max_grad_norm": 1e9, "save_steps": 100,
    }  # fmt: skip
    report = run.train(**settings)
    assert report["stopped_early"]
    best = report["best"]["step"]
    assert report["steps"] == best + 4
    lengths = {entry["step"]: entry["eval_acceptance_length"] for entry in report["history"] if "eval_loss" in entry}
    assert lengths[best] == max(lengths.values()) == report["simulated_acceptance_length"]
    written = load_file(run.folder / "out" / "draft.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in drafts[best].items())
    assert not all(torch.equal(written[name], tensor) for name, tensor in drafts[report["steps"]].items())
    # The last step is saved, though neither a multiple of save_steps nor the end of the plan.
    assert [path.name for path in run.checkpoints()] == [f"checkpoint-{report['steps']}"]
    drafts.clear()
    again = run.train("again", **settings)
    assert not drafts
    assert (again["steps"], again["best"], again["stopped_early"]) == (report["steps"], report["best"], True)
    assert load_file(run.folder / "again" / "draft.safetensors").keys() == written.keys()
    kept = load_file(run.folder / "again" / "draft.safetensors")
    assert all(torch.equal(kept[name], tensor) for name, tensor in written.items())


def test_a_lost_best_draft_is_told_and_the_last_one_written(make_run: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run()
    settings = {"epochs": 10, "eval_steps": 2, "learning_rate": 0.3, "early_stopping_patience": 1, "max_grad_norm": 1e9}
    first = run.train(**settings)
    assert first["best"]["step"] < first["steps"]
    (best,) = (run.folder / "work").glob("*/best-*.safetensors")
    best.unlink()
    report = run.train("again", **settings)
    assert report["best"]["step"] == report["steps"]
    assert "does not hold that draft: the last one is kept" in capsys.readouterr().err
