"""The stage as a whole, on a target of a few thousand weights."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.errors import DraftsmithError
from draftsmith.train_draft import checkpoints, fingerprint
from draftsmith.train_draft import trainer as trainer_module
from draftsmith.train_draft.dataset import Row

Make = Callable[..., Any]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Rows of every training pack, as they are read."""
    packs: list[list[str]] = []
    collate = trainer_module.collate

    def record(examples: Any, steps: int, **how: Any) -> Any:
        packs.append([example.row.row_id for example in examples])
        return collate(examples, steps, **how)

    monkeypatch.setattr(trainer_module, "collate", record)
    return packs


def test_learns_and_reports(make_run: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run()
    report = run.train(epochs=25, save_steps=100, eval_steps=25)
    first, last = report["history"][0], report["history"][-1]
    assert first["step"] == 0
    assert first["eval_acceptance_length"] < 1.2
    # Half of the target's tokens are outside the draft vocabulary: even a perfect draft is accepted about every other time.
    assert 0.35 < report["accuracy"][0] < 0.6
    assert last["eval_loss"] < 0.5 * first["eval_loss"]
    assert last["step"] == report["steps"]
    assert report["epochs"] == pytest.approx(25, abs=0.5)
    best = report["best"]
    assert best["eval_acceptance_length"] == max(
        entry["eval_acceptance_length"] for entry in report["history"] if "eval_loss" in entry
    )
    first_token, second_token = best["eval_acceptance"]
    assert (
        report["simulated_acceptance_length"]
        == best["eval_acceptance_length"]
        == pytest.approx(1 + first_token + first_token * second_token)
    )
    assert report["resumed_from"] is None
    assert report["tokens_per_second"] == pytest.approx(report["tokens"] / report["seconds"], rel=0.2)
    trained = next(entry for entry in report["history"] if entry["step"] == 7)
    assert {"loss", "accuracy", "learning_rate", "grad_norm", "tokens_per_second", "epoch"} < set(trained)
    weights = load_file(run.folder / "out" / "draft.safetensors")
    assert weights["lm_head.weight"].shape == (24, 32)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert "embed_tokens.weight" not in weights
    assert sum(tensor.numel() for tensor in weights.values()) == report["params"]
    # Norms start at exactly 1 and must move.
    assert bool((weights["norm.weight"] != 1).all())
    lines = capsys.readouterr().err
    assert f"step {report['steps']}/{report['steps']}  loss " in lines
    assert "tokens/s" in lines
    assert "\r" not in lines


def _stop_at(pack: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send SIGTERM to this process while the pack of that number is read."""
    collate, count = trainer_module.collate, 0

    def stopping(examples: Any, steps: int, **how: Any) -> Any:
        nonlocal count
        count += 1
        if count == pack:
            os.kill(os.getpid(), signal.SIGTERM)
        return collate(examples, steps, **how)

    monkeypatch.setattr(trainer_module, "collate", stopping)


def test_sigterm_saves_and_a_second_call_goes_on_as_if_nothing_had_been(
    make_run: Make, seen: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 + 5 steps equal 10: losses, rows in their order, weights."""
    run = make_run(validation=0)
    settings = {"max_steps": 10, "packs_per_step": 2, "save_steps": 100}
    whole = run.train("whole", "work-whole", **settings)
    order = list(seen)
    assert len(order) == 20
    seen.clear()
    with monkeypatch.context() as patch:
        # Pack 9 is the first of step 5.
        _stop_at(9, patch)
        with pytest.raises(SystemExit) as ended:
            run.train("parts", "work-parts", **settings)
    assert ended.value.code == 143
    assert [path.name for path in run.checkpoints("work-parts")] == ["checkpoint-5"]
    assert not (run.folder / "parts").exists()
    parts = run.train("parts", "work-parts", **settings)
    assert seen == order
    assert parts["resumed_from"] == 5
    assert [entry["step"] for entry in parts["history"]] == list(range(1, 11))
    for one, other in zip(parts["history"], whole["history"], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-6)
        assert one["learning_rate"] == other["learning_rate"]
    assert parts["tokens"] == whole["tokens"]
    expected = load_file(run.folder / "whole" / "draft.safetensors")
    for name, tensor in load_file(run.folder / "parts" / "draft.safetensors").items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=1e-5, msg=name)


def test_killed_while_saving_falls_back_to_the_checkpoint_before(
    make_run: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends before checkpoint-10 is declared complete; the next one goes on from 5 and saves 10 anew."""
    run = make_run(validation=0)
    publish = checkpoints.publish

    def killed(staged: Path, folder: Path, noted: dict[str, Any]) -> Path:
        if staged.name == "checkpoint-10":
            raise KeyboardInterrupt
        return publish(staged, folder, noted)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "publish", killed)
        with pytest.raises(KeyboardInterrupt):
            run.train(max_steps=10, save_total_limit=1)
    # The older one was not dropped for one that never became complete.
    assert [path.name for path in run.checkpoints()] == ["checkpoint-5"]
    assert run.train(max_steps=10, save_total_limit=1)["resumed_from"] == 5
    assert [path.name for path in run.checkpoints()] == ["checkpoint-10"]


def test_finished_training_is_not_repeated(make_run: Make, seen: list[list[str]]) -> None:
    run = make_run()
    first = run.train(max_steps=5)
    trained = len(seen)
    again = run.train(max_steps=5)
    # One pack more is the validation's.
    assert len(seen) - trained <= 2
    assert again["history"] == first["history"]
    assert again["tokens_per_second"] == first["tokens_per_second"]


def test_checkpoints_hold_no_embedding_and_no_pickled_arguments(make_run: Make) -> None:
    run = make_run(validation=0)
    run.train(max_steps=5)
    (checkpoint,) = run.checkpoints()
    assert not (checkpoint / "training_args.bin").exists()
    assert not any("embed" in name for name in load_file(checkpoint / "model.safetensors"))
    # What torch.load may read of a stranger's file, it reads of ours: transformers loads with weights_only.
    moments = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    assert all(state["step"] == 5 for state in moments["state"].values())
    assert {tensor.dtype for state in moments["state"].values() for tensor in state.values()} == {torch.float32}


def test_not_finite_loss_names_the_row(make_run: Make) -> None:
    def poison(number: int, aux: torch.Tensor, final: torch.Tensor) -> None:
        if number == 4:
            aux[2, 0, 0] = float("nan")

    run = make_run(edit=poison)
    with pytest.raises(DraftsmithError) as raised:
        run.train(epochs=1)
    assert run.row_ids[4] in str(raised.value)
    assert run.row_ids[5] not in str(raised.value)
    assert "extract_shard" in str(raised.value)


def test_divergence_names_all_rows_of_the_pack(make_run: Make) -> None:
    run = make_run(validation=0)
    with pytest.raises(DraftsmithError, match=r"lower train\.learning_rate"):
        run.train(epochs=50, learning_rate=1e30, max_grad_norm=1e30)


def test_no_validation_rows_is_said_and_fine(make_run: Make, capsys: pytest.CaptureFixture[str]) -> None:
    report = make_run(validation=0).train(max_steps=2)
    assert report["simulated_acceptance_length"] is report["accuracy"] is report["best"] is None
    assert "no validation rows" in capsys.readouterr().err


def test_failed_rows_are_left_out_and_lost_ones_refused(
    make_run: Make, seen: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(validation=0)
    path = run.folder / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["rows"][run.row_ids[3]]
    path.write_text(json.dumps(manifest))
    with pytest.raises(DraftsmithError, match=run.row_ids[3]):
        run.train(epochs=1)
    manifest["failed"] = [{"row_id": run.row_ids[3], "error": "traceback"}]
    path.write_text(json.dumps(manifest))
    run.train(epochs=1)
    assert {row for pack in seen for row in pack} == set(run.row_ids) - {run.row_ids[3]}
    assert "1 rows without states" in capsys.readouterr().err


def test_states_of_another_width_are_refused(make_run: Make) -> None:
    run = make_run()
    path = run.folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_size": 64}))
    with pytest.raises(DraftsmithError, match="64 wide, the target 32"):
        run.train()


def test_layers_are_those_of_the_states(make_run: Make) -> None:
    """target.json says nothing of layers; the draft, and its report, take the manifest's."""
    run = make_run(validation=0)
    assert "layers" not in json.loads((run.folder / "target.json").read_text())
    assert run.train(max_steps=1)["layers"] == [1, 2, 3]
    assert load_file(run.folder / "out" / "draft.safetensors")["fc.weight"].shape == (32, 96)


def test_frozen_head_stays(make_run: Make) -> None:
    run = make_run(validation=0)
    run.train(max_steps=3, train_head=False)
    head = load_file(run.folder / "out" / "draft.safetensors")["lm_head.weight"]
    assert torch.equal(head, load_file(run.folder / "tiny" / "model.safetensors")["lm_head.weight"][::2])


def test_two_packs_a_step_equal_one_large_pack(make_run: Make) -> None:
    """Two packs of 8 rows a step, or one of 16: the same loss and the same weights after a step."""
    run = make_run(validation=0)
    large = run.train("large", pack_tokens=100_000, max_steps=2)
    split = run.train("split", pack_tokens=300, packs_per_step=2, max_steps=2)
    assert [entry["loss"] for entry in split["history"]] == pytest.approx(
        [entry["loss"] for entry in large["history"]], abs=1e-5
    )


def test_bfloat16_products_stay_close_and_weights_float32(make_run: Make) -> None:
    run = make_run(validation=0)
    exact = run.train("exact", max_steps=4)
    rounded = run.train("rounded", max_steps=4, dtype="bfloat16")
    for one, other in zip(rounded["history"], exact["history"], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=0.03)
    assert rounded["history"] != exact["history"]
    assert load_file(run.folder / "rounded" / "draft.safetensors")["fc.weight"].dtype == torch.float32


def test_fingerprint_follows_what_changes_the_result(make_run: Make) -> None:
    run = make_run()
    target = json.loads((run.folder / "target.json").read_text())
    manifest = json.loads((run.folder / "manifest.json").read_text())
    rows, d2t = [Row("a", 9, (3,), (9,))], torch.arange(4)

    def key(**changes: Any) -> str:
        values: dict[str, Any] = {
            "settings": run.config().train,
            "target": target,
            "manifest": manifest,
            "rows": rows,
            "d2t": d2t,
            "dtype": "float32",
        }
        return fingerprint(**values | changes)

    assert key() == key(
        settings=run.config(save_steps=7, logging_steps=3, eval_steps=9, save_total_limit=5, compile=False).train
    )
    # Another template, of which the rows are the same.
    assert key() == key(target=target | {"states_fingerprint": target["fingerprint"], "fingerprint": "0"})
    others = [
        key(settings=run.config(learning_rate=1e-5).train),
        key(settings=run.config(norm_output=True).train),
        key(target=target | {"states_fingerprint": "0"}),
        key(manifest=manifest | {"fingerprint": "1"}),
        key(manifest=manifest | {"layers": [1, 2, 4]}),
        key(rows=[Row("a", 9, (3,), (8,))]),
        key(rows=[*rows, Row("b", 9, (3,), (9,))]),
        key(d2t=torch.arange(5)),
        key(dtype="bfloat16"),
        key(settings=run.config(packs_per_step=2).train),
    ]
    assert len({key(), *others}) == len(others) + 1
