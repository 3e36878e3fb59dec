"""What a training asks at its steps: how often it reports, and whether it has been told to leave."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from draftsmith.log import log
from draftsmith.signals import Termination


class AsSet(TrainerCallback):
    """Lets a resumed training log, validate and save as it is set now; the checkpoint brings what was set then."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """Take the three numbers of steps from the arguments."""
        state.compute_steps(args, state.max_steps)
        return control


class OrderlyEnd(TrainerCallback):
    """Turns a SIGTERM into a checkpoint and the end of training, on all processes at the same step."""

    def __init__(self, termination: Termination) -> None:
        self.termination = termination

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """Ask for a checkpoint and the end, once any process has been told to leave."""
        asked = self.termination.asked
        if args.world_size > 1:
            flag = torch.tensor(float(asked), device=args.device)
            torch.distributed.all_reduce(flag)
            asked = self.termination.asked = bool(flag > 0)
        if asked:
            if state.is_world_process_zero:
                log(f"SIGTERM: saving a checkpoint at step {state.global_step}, then leaving")
            control.should_save = control.should_training_stop = True
            # The time until SIGKILL is for the checkpoint.
            control.should_evaluate = False
        return control
