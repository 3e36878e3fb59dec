"""Several processes, as on several GPUs, but over gloo."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from draftsmith import train_draft
from draftsmith.config import parse
from draftsmith.draft.config import DraftShape
from draftsmith.draft.initial import initial_draft
from draftsmith.draft.metrics import Tally
from draftsmith.draft.slots import counted_slots
from draftsmith.draft.teacher import Teacher
from draftsmith.errors import DraftsmithError
from draftsmith.files import read_json
from draftsmith.train_draft import ranks, weights
from draftsmith.train_draft.arguments import arguments
from draftsmith.train_draft.dataset import Example, Row
from draftsmith.train_draft.guard import Guard
from draftsmith.train_draft.objective import Objective
from draftsmith.train_draft.packing import Pack, collate, empty_pack
from draftsmith.train_draft.plan import make_plan
from draftsmith.train_draft.trainer import DraftTrainer


def _fail_on_rank_1(folder: Path) -> None:
    if ranks.rank() == 1:
        raise DraftsmithError("rank 1 has no luck")
    time.sleep(900)


def _write_rank(folder: Path) -> None:
    (folder / f"{ranks.rank()}-of-{ranks.world_size()}-{os.environ['LOCAL_RANK']}").touch()


def _wait_for_term(folder: Path) -> None:
    signal.signal(signal.SIGTERM, lambda *_: (folder / f"left-{ranks.rank()}").touch() or os._exit(143))
    (folder / f"up-{ranks.rank()}").touch()
    time.sleep(900)


def _train_in_turn(trainings: list[dict[str, Any]], sharded: Path) -> None:
    for training in trainings:
        # What accelerate knows of a process is of one training.
        AcceleratorState._reset_state()
        train_draft._train(**training)
    _sharded_step(sharded)


def _objective() -> Objective:
    shape = DraftShape(
        hidden_size=16, heads=4, kv_heads=2, head_dim=8, intermediate_size=24, rms_norm_eps=1e-6,
        rope={"rope_type": "default", "rope_theta": 10000.0}, max_positions=128, target_vocab=40, draft_vocab=12,
        layers=(1, 2, 3), norm_before_residual=True, fc_norm=False, norm_output=False,
    )  # fmt: skip
    random = torch.Generator().manual_seed(0)
    head, d2t = torch.randn(40, 16, generator=random), torch.arange(12)
    return Objective(initial_draft(shape, head, head, d2t, seed=1), Teacher(shape, head, d2t), 3, 0.8, torch.float32)


def _packs() -> list[Pack]:
    """One of a row with 11 slots that count, one of none."""
    random = torch.Generator().manual_seed(5)
    states = SimpleNamespace(
        token_ids=torch.arange(14, dtype=torch.int32),
        aux=torch.randn(14, 3, 16, generator=random),
        final=torch.randn(14, 16, generator=random),
    )
    row = Example(Row("row", 14, (2,), (14,)), states, *counted_slots([2], [14], 14, 3))
    return [collate([row], 3), empty_pack(16, 3, 3)]


def _sharded_step(folder: Path) -> None:
    """Each of two processes holds half of every weight; accelerate does this on GPUs alone, so torch is asked itself."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    objective = _objective()
    fully_shard(objective, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=False)
    pack = _packs()[ranks.rank()]
    result = objective(pack, _packs()[0].counts)
    # As the trainer has it: gradients are averaged over processes, and the loss is a share of all of them.
    (result.loss * 2).backward()
    gradients = {name: parameter.grad.full_tensor() for name, parameter in objective.named_parameters()}
    validated = _validate(objective)
    whole = weights.whole(objective.draft)
    if ranks.rank() == 0:
        found = {"loss": result.loss.detach(), "gradients": gradients, "weights": whole, "validated": validated}
        torch.save(found, folder)


def _validate(objective: Objective) -> dict[str, Any]:
    """The trainer's validation on one pack, whatever the number of processes: each of a sharded draft must take one."""
    found: dict[str, Any] = {}
    trainer = SimpleNamespace(
        objective=objective,
        guard=Guard("stop"),
        validation=[[0]],
        validation_rows=None,
        args=SimpleNamespace(process_index=ranks.rank(), world_size=ranks.world_size(), device=torch.device("cpu")),
        state=SimpleNamespace(global_step=1),
        control=None,
        callback_handler=SimpleNamespace(on_evaluate=lambda *_: None),
        log=found.update,
        _pack=lambda rows, numbers, pin: _packs()[0 if numbers else 1],
        _stop_clock=lambda: None,
    )
    return found | DraftTrainer.evaluate(trainer)  # type: ignore[arg-type]


def test_two_processes_train_as_one(make_run: Callable[..., Any]) -> None:
    """The same packs, losses and accuracies as in one process, step by step.

    - even: a pack each;
    - uneven: three packs a step, so that the second process has one, and an empty one;
    - empty: fewer packs than processes;
    - begun: ends early; one process, told to go on, then takes two packs a step, as noted in the checkpoint.

    And a step with halves of weights and gradients on each (FSDP), and a validation of fewer packs than processes.
    """
    run = make_run()
    settings: dict[str, Any] = {"max_steps": 4, "eval_steps": 2}
    cases: dict[str, dict[str, Any]] = {
        "even": {},
        "uneven": {"packs_per_step": 3},
        "empty": {"packs_per_step": 1},
        "begun": {"epochs": 4, "max_steps": None, "eval_steps": 1, "early_stopping_patience": 1, "learning_rate": 0.2},
    }
    ranks.run_on_all(
        2,
        _train_in_turn,
        {"trainings": [{"config": run.config(**settings | case), **run.paths(f"two-{name}", f"work-{name}")} for name, case in cases.items()],
         "sharded": run.folder / "sharded.pt"},
    )  # fmt: skip
    _check_sharded(torch.load(run.folder / "sharded.pt", weights_only=True))
    for name, case in cases.items():
        alone = run.train(f"one-{name}", f"work-one-{name}", **settings | {"packs_per_step": 2} | case)
        two = read_json(run.folder / f"two-{name}" / "train.json")
        assert two["world_size"] == 2
        assert two["packs_per_step"] == alone["packs_per_step"] == case.get("packs_per_step", 2)
        assert two["tokens"] == alone["tokens"]
        assert len(two["history"]) == len(alone["history"]) == alone["steps"] + 1
        for one, other in zip(two["history"], alone["history"], strict=True):
            for what in ("loss", "grad_norm", "accuracy", "eval_loss", "eval_accuracy", "eval_acceptance_length"):
                if what in other:
                    assert one[what] == pytest.approx(other[what], abs=1e-4, rel=1e-4), (name, what)
        found, expected = (load_file(run.folder / f"{many}-{name}" / "draft.safetensors") for many in ("two", "one"))
        for weight, tensor in expected.items():
            torch.testing.assert_close(found[weight], tensor, atol=1e-4, rtol=1e-3, msg=f"{name}: {weight}")
    _goes_on_alone(run, settings | cases["begun"])


def _check_sharded(found: dict[str, Any]) -> None:
    objective, pack = _objective(), _packs()[0]
    result = objective(pack, pack.counts)
    result.loss.backward()
    torch.testing.assert_close(found["loss"], result.loss.detach())
    assert found["gradients"].keys() == dict(objective.named_parameters()).keys()
    for name, parameter in objective.named_parameters():
        torch.testing.assert_close(found["gradients"][name], parameter.grad, msg=name)
    for name, tensor in objective.draft.state_dict().items():
        assert torch.equal(found["weights"][name], tensor), name
    objective.eval()
    tally = Tally(3)
    result = objective(pack, pack.counts, True)
    tally.add(pack, result.sums, result.hits)
    expected = tally.metrics(0.8)
    assert found["validated"].keys() == {f"eval_{name}" for name in expected}
    for name, figure in expected.items():
        assert found["validated"][f"eval_{name}"] == pytest.approx(figure), name


def test_arguments_of_a_sharded_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan([5] * 6, 8, seed=0, epochs=1, max_steps=None, group=3)
    settings = parse({"train": {"fsdp": True}}, "test").train
    assert not arguments(settings, tmp_path, plan, validate=False, fresh=True).fsdp
    monkeypatch.setattr(ranks, "world_size", lambda: 2)
    made = arguments(settings, tmp_path, plan, validate=False, fresh=True)
    assert made.fsdp
    assert made.fsdp_plugin_args["fsdp_version"] == 2
    assert made.fsdp_plugin_args["reshard_after_forward"] is False
    assert made.fsdp_plugin_args["state_dict_type"] == "FULL_STATE_DICT"
    assert made.gradient_accumulation_steps == 2


def _goes_on_alone(run: Any, settings: dict[str, Any]) -> None:
    begun = read_json(run.folder / "two-begun" / "train.json")
    assert begun["stopped_early"]
    longer = settings | {"early_stopping_patience": None}
    report = run.train("went-on", "work-begun", **longer)
    assert (report["resumed_from"], report["packs_per_step"], report["world_size"]) == (begun["steps"], 2, 1)
    never_stopped = run.train("never-stopped", "work-never", **longer | {"packs_per_step": 2})
    losses, expected = (
        [entry["loss"] for entry in each["history"] if "loss" in entry] for each in (report, never_stopped)
    )
    assert len(losses) == report["steps"] > begun["steps"]
    assert losses == pytest.approx(expected, abs=1e-4, rel=1e-4)


def test_environment_of_each_process(tmp_path: Path) -> None:
    ranks.run_on_all(2, _write_rank, {"folder": tmp_path})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-of-2-0", "1-of-2-1"]


def test_one_that_fails_ends_the_others(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(DraftsmithError, match="exit codes"):
        ranks.run_on_all(2, _fail_on_rank_1, {"folder": tmp_path})
    assert time.monotonic() - started < 300


def test_sigterm_is_passed_on(tmp_path: Path) -> None:
    def terminate() -> None:
        deadline = time.monotonic() + 300
        while len(list(tmp_path.glob("up-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=terminate).start()
    with pytest.raises(SystemExit) as ended:
        ranks.run_on_all(2, _wait_for_term, {"folder": tmp_path})
    assert ended.value.code == 143
    assert sorted(path.name for path in tmp_path.glob("left-*")) == ["left-0", "left-1"]
