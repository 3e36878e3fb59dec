"""One line of the log for each report of the trainer."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from draftsmith import progress_file
from draftsmith.log import log


class ProgressLines(TrainerCallback):
    """Prints losses, accuracy, speed and the time left, on the first process alone."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Print what was logged, if it is a training step or a validation."""
        if not state.is_world_process_zero or logs is None:
            return
        place = f"step {state.global_step}/{state.max_steps}"
        if "eval_loss" in logs:
            log(
                f"{place}  validation loss {logs['eval_loss']:.4f}  accuracy {_percent(logs['eval_accuracy'])}  "
                f"simulated acceptance length {logs['eval_acceptance_length']:.3f}"
            )
        elif "seconds_left" in logs:
            # A step that was left out has neither.
            loss = f"loss {logs['loss']:.4f}" if "loss" in logs else "left out"
            right = f"accuracy {_percent(logs['accuracy'])}  " if "accuracy" in logs else ""
            log(
                f"{place}  {loss}  {right}lr {logs['learning_rate']:.2e}  "
                f"{logs['tokens_per_second']:,.0f} tokens/s  {_duration(logs['seconds_left'])} left"
            )
            progress_file.report(
                state.global_step, state.max_steps, "steps", phase=loss,
                tokens_per_second=logs["tokens_per_second"], seconds_left=logs["seconds_left"], always=state.global_step == state.max_steps,
            )  # fmt: skip


def _percent(shares: list[float]) -> str:
    return "/".join(f"{share:.1%}" for share in shares)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
