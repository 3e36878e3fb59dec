"""Holds a training after five steps until it is told to stop; Python imports this file by its name, where it is on the path.

With a file of the name that DRAFTSMITH_LET_GO has, nothing is held any more.
"""

import os
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "often"))
import soon  # noqa: F401

# After `soon`, which lets this process find it.
from after_import import after_import


def change(trainer):
    step = trainer.DraftTrainer.training_step

    def held(self, *arguments, **more):
        let_go = Path(os.environ["DRAFTSMITH_LET_GO"])
        (end,) = [each for each in self.callback_handler.callbacks if hasattr(each, "termination")]
        while self.state.global_step == 5 and not (end.termination.asked or let_go.exists()):
            let_go.with_suffix(".held").touch()
            time.sleep(0.05)
        return step(self, *arguments, **more)

    trainer.DraftTrainer.training_step = held


after_import("draftsmith.train_draft.trainer", change)
