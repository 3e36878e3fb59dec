"""A training that goes on from a draft: it begins where that one ended, and another source is another training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from draftsmith import export_draft
from draftsmith.config import parse
from draftsmith.errors import DraftsmithError
from draftsmith.files import read_json, write_json


def _exported(run: Any, name: str) -> Path:
    target = run.folder / "target.json"
    write_json(target, read_json(target) | {"max_positions": 256})
    folder = run.folder / name
    paths = {"draft": run.folder / "out/draft.safetensors", "train_report": run.folder / "out/train.json"}
    export_draft.run(
        parse({"export": {"dtype": "float32"}}, "test"), target=target, vocabulary=run.folder / "vocabulary.safetensors",
        folder=folder, report=folder / "export.json", **paths,
    )  # fmt: skip
    return folder


def test_goes_on_from_the_source(make_run: Callable[..., Any]) -> None:
    run = make_run()
    before = run.train(max_steps=30, eval_steps=30)
    source = _exported(run, "source")
    # One step of almost no length: what is validated is the source itself.
    still = {"max_steps": 1, "eval_steps": 1, "learning_rate": 1e-12}
    after = run.train(out="warm", initial_draft=str(source), **still)
    new = run.train(out="cold", **still)
    assert after["best"]["eval_loss"] == pytest.approx(before["best"]["eval_loss"], rel=1e-5)
    assert after["acceptance"] == pytest.approx(before["acceptance"])
    assert new["best"]["eval_loss"] > 1.2 * before["best"]["eval_loss"]

    moved = source.rename(source.with_name("moved"))
    assert run.train(out="moved_out", initial_draft=str(moved), **still)["fingerprint"] == after["fingerprint"]
    tensors = load_file(moved / "model.safetensors")
    tensors["norm.weight"][0] += 0.01
    save_file(tensors, moved / "model.safetensors")
    assert run.train(out="other", initial_draft=str(moved), **still)["fingerprint"] != after["fingerprint"]
    assert new["fingerprint"] != after["fingerprint"]


def test_source_of_another_vocabulary_is_refused(make_run: Callable[..., Any]) -> None:
    run = make_run()
    run.train(max_steps=1)
    source = _exported(run, "source")
    save_file(
        {"d2t": load_file(run.folder / "vocabulary.safetensors")["d2t"][:20]}, run.folder / "vocabulary.safetensors"
    )
    with pytest.raises(DraftsmithError, match=r"d2t of .* \(24 tokens\) than this run has \(20\)"):
        run.train(out="warm", max_steps=1, initial_draft=str(source))
