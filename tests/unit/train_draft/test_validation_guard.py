"""Validation rows whose stored states are not finite, and drafts that give no finite loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

import training_run
from draftsmith.errors import DraftsmithError

Make = Callable[..., Any]
# The second of the three validation rows.
BAD = 17


def _poison(where: str) -> Callable[[int, torch.Tensor, torch.Tensor], None]:
    def edit(number: int, aux: torch.Tensor, final: torch.Tensor) -> None:
        if number == BAD:
            (aux if where == "aux" else final)[5:] = float("nan")

    return edit


@pytest.mark.parametrize("where", ["aux", "final"])
def test_the_row_is_named_before_anything_is_trained(where: str, make_run: Make) -> None:
    run = make_run(edit=_poison(where))
    with pytest.raises(DraftsmithError) as raised:
        run.train(max_steps=2)
    said = str(raised.value)
    assert said.startswith("validation at step 0: its loss is not finite, because the stored states of these rows are")
    assert [row for row in run.row_ids if row in said] == [run.row_ids[BAD]]
    assert "--forcerun extract_shard" in said
    assert "train.on_bad_loss: skip" in said
    assert run.checkpoints() == []


def test_its_pack_is_left_out_of_every_validation(
    make_run: Make, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    """The figures are those of a run without the row, whose packs are of one row each."""
    settings = {"max_steps": 4, "eval_steps": 2, "pack_tokens": 32, "on_bad_loss": "skip"}
    run = make_run(edit=_poison("aux"))
    report = run.train(**settings)
    assert capsys.readouterr().err.count("left out of every validation") == 1
    without = training_run.make(tmp_path_factory.mktemp("without"))
    table = pd.read_parquet(without.folder / "rows.parquet")
    table[table["row_id"] != run.row_ids[BAD]].to_parquet(without.folder / "rows.parquet")
    expected = without.train(**settings)
    found, right = ([entry for entry in each["history"] if "eval_loss" in entry] for each in (report, expected))
    assert [entry["step"] for entry in found] == [0, 2, 4]
    assert [entry["eval_rows_left_out"] for entry in found] == [1, 1, 1]
    for one, other in zip(found, right, strict=True):
        assert "eval_rows_left_out" not in other
        for name in ("eval_loss", "eval_accuracy", "eval_acceptance", "eval_acceptance_length"):
            assert one[name] == pytest.approx(other[name], rel=1e-6)
    assert report["best"]["step"] == expected["best"]["step"]
    # A second call repeats neither the training nor the failure.
    assert run.train(**settings)["history"] == report["history"]


def test_where_no_row_is_left_the_last_draft_is_written(make_run: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(edit=_poison("final"))
    report = run.train(max_steps=2, pack_tokens=200, on_bad_loss="skip")
    assert (report["best"], report["simulated_acceptance_length"], report["steps"]) == (None, None, 2)
    assert not any("eval_loss" in entry for entry in report["history"])
    assert capsys.readouterr().err.count("left out of every validation") == 1
    assert (run.folder / "out" / "draft.safetensors").exists()


def test_a_draft_that_has_diverged_is_no_best_draft(make_run: Make, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights of 1e30 give no finite loss: what is written is the draft that was validated before them."""
    run = make_run()
    report = run.train(max_steps=4, learning_rate=1e30, on_bad_loss="skip")
    assert report["best"]["step"] == 0
    assert [entry["step"] for entry in report["history"] if "eval_loss" in entry] == [0]
    weights = load_file(run.folder / "out" / "draft.safetensors")
    assert bool((weights["norm.weight"] == 1).all())
    said = capsys.readouterr().err
    assert "validation at step 4: its loss is not finite, though the states of its rows are" in said
    assert "it gives no figures" in said
    with pytest.raises(DraftsmithError, match=r"step \d: .*training has diverged: lower train\.learning_rate"):
        run.train("stopped", "work-stopped", max_steps=4, learning_rate=1e30)
