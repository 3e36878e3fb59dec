"""What a training leaves behind: the weights of its best draft and the course that it took."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from torch import Tensor

from draftsmith.draft.trained_as import KEY
from draftsmith.files import write_json
from draftsmith.log import log
from draftsmith.train_draft import best_draft, ranks, weights
from draftsmith.train_draft.judge import METRIC, best, validations
from draftsmith.train_draft.plan import Plan
from draftsmith.train_draft.trainer import DraftTrainer


def write(
    trainer: DraftTrainer,
    last: dict[str, Tensor],
    plan: Plan,
    folder: Path,
    draft: Path,
    report: Path,
    *,
    key: str,
    layers: list[int],
    resumed: int | None,
    params: int,
    packing: dict[str, int | float],
    trained: dict[str, Any],
) -> None:
    """Write the weights of the best validated draft, or the ``last`` where nothing was validated, and the training's report.

    ``trained`` is what :func:`draftsmith.draft.trained_as.trained_as` says of the draft; it stands with the weights.
    """
    history = history_of(trainer.state.log_history, plan)
    chosen = best(history)
    step = trainer.state.global_step
    state = None if chosen is None or chosen["step"] == step else best_draft.read(folder, chosen["step"])
    if chosen is not None and chosen["step"] != step:
        length = f"the simulated acceptance length was longest at step {chosen['step']} ({chosen[METRIC]:.3f})"
        if state is None:
            log(
                f"{length}, but {best_draft.path_of(folder, chosen['step'])} does not hold that draft: the last one is kept"
            )
            chosen = next((entry for entry in validations(history) if entry["step"] == step), None)
        else:
            log(f"{length}: that draft is kept; fewer train.epochs or more conversations may serve as well")
    with weights.told(draft, step, folder):
        weights.write(
            {name: tensor.detach().float().cpu() for name, tensor in (state or last).items()},
            draft,
            {"fingerprint": key, KEY: json.dumps(trained)},
        )
    kept = chosen or {}
    course = {
        "fingerprint": key,
        "layers": layers,
        "steps": step,
        "epochs": round(plan.epoch(step), 4),
        "stopped_early": step < plan.steps,
        "params": params,
        "resumed_from": resumed,
        "seconds": round(trainer.seconds, 1),
        "tokens": trainer.tokens,
        "tokens_per_second": round(trainer.tokens / trainer.seconds, 1) if trainer.seconds else None,
        "waited_for_data": round(trainer.waited / trainer.seconds, 4) if trainer.seconds else None,
        "world_size": ranks.world_size(),
        "packs_per_step": plan.group,
        "skipped": trainer.guard.skipped,
        "packing": packing,
        "best": chosen,
        "simulated_acceptance_length": kept.get("eval_acceptance_length"),
        "accuracy": kept.get("eval_accuracy"),
        "acceptance": kept.get("eval_acceptance"),
        "history": history,
    }
    with weights.told(report, step, folder):
        write_json(report, course)
    left_out = f", {len(trainer.guard.skipped)} of them left out" if trainer.guard.skipped else ""
    length = f"simulated acceptance length {kept[METRIC]:.3f}; " if kept else ""
    log(
        f"trained {step} steps{left_out} on {trainer.tokens:,} tokens in {trainer.seconds:.0f} s; {length}{draft} written"
    )


def history_of(logged: list[dict[str, Any]], plan: Plan) -> list[dict[str, Any]]:
    """One entry a step that was logged or validated, in order, in epochs of rows instead of Trainer's."""
    wanted = ("loss", "accuracy", "learning_rate", "grad_norm", "tokens_per_second")
    steps: dict[int, dict[str, Any]] = {}
    for entry in logged:
        # JSON has no NaN, which the gradient's norm is where a step was left out.
        kept = {name: value for name, value in entry.items() if name in wanted or name.startswith("eval_")}
        kept = {name: value for name, value in kept.items() if not isinstance(value, float) or math.isfinite(value)}
        # What a validation without a loss counts as accepted is no figure.
        if "eval_loss" not in kept:
            kept = {name: value for name, value in kept.items() if not name.startswith("eval_")}
        if kept:
            step = int(entry["step"])
            steps.setdefault(step, {"step": step, "epoch": round(plan.epoch(step), 4)}).update(kept)
    return [steps[step] for step in sorted(steps)]
