"""Which of the validated drafts is the best, and when to stop looking for a better one.

A draft is judged by its simulated acceptance length on the validation rows: loss and accuracy can improve while the tokens that
a server would accept get fewer. Everything is read off Trainer's history, which is part of every checkpoint, so that a resumed
training judges like one that was never stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from draftsmith.log import log

METRIC = "eval_acceptance_length"


def validations(history: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries with a validation, one a step (the later of two), oldest first.

    One whose loss is missing or no finite number is none: the tokens that it counts as accepted say nothing.
    """
    found = {int(entry["step"]): entry for entry in history if METRIC in entry and _finite(entry)}
    return [found[step] for step in sorted(found)]


def best(history: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The validation with the longest simulated acceptance; of equals that with the lowest loss."""
    return max(validations(history), key=lambda entry: (entry[METRIC], -entry["eval_loss"]), default=None)


def _finite(entry: dict[str, Any]) -> bool:
    figures = (entry[METRIC], entry.get("eval_loss"))
    return all(isinstance(figure, int | float) and math.isfinite(figure) for figure in figures)


def exhausted(history: Sequence[dict[str, Any]], patience: int | None) -> bool:
    """Whether ``patience`` validations have come after the best one."""
    found, top = validations(history), best(history)
    return patience is not None and top is not None and sum(entry["step"] > top["step"] for entry in found) >= patience


class Judge(TrainerCallback):
    """Keeps the weights of the best validated draft, and ends a training that no longer improves."""

    def __init__(self, keep: Callable[[int], None], patience: int | None) -> None:
        """``keep`` stores the weights as those of a step, on all processes together."""
        self.keep, self.patience = keep, patience

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """Compare the validation that was just logged with those before it."""
        top = best(state.log_history)
        if top is not None and top["step"] == state.global_step:
            self.keep(state.global_step)
        if exhausted(state.log_history, self.patience) and not control.should_training_stop:
            assert top is not None
            if state.is_world_process_zero:
                log(
                    f"the simulated acceptance length was {top[METRIC]:.3f} at step {top['step']} and has not been longer in "
                    f"{self.patience} validations since: training ends (train.early_stopping_patience)"
                )
            control.should_training_stop = control.should_save = True
        return control
