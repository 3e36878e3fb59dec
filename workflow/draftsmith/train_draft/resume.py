"""From which checkpoint a training goes on, and along which plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn

from draftsmith.errors import DraftsmithError
from draftsmith.train_draft import checkpoints
from draftsmith.train_draft.plan import Plan


def resumable(
    folder: Path, planned: Callable[[dict[str, Any]], Plan], tell: Callable[[str], None]
) -> tuple[Path | None, dict[str, Any], Plan]:
    """The newest sound checkpoint on the plan that its notes lead to, with both; or none, no notes, and a new plan.

    One that is beyond its plan is another training's: it is told, passed over and left alone.
    """
    for checkpoint in checkpoints.sound(folder):
        noted = checkpoints.notes(checkpoint)
        plan = planned(noted)
        if checkpoints.step_of(checkpoint) <= plan.steps:
            return checkpoint, noted, plan
        tell(
            f"{checkpoint}: this training has {plan.steps} steps, so it is another training's; it is passed over and left alone"
        )
    return None, {}, planned({})


def check_fit(checkpoint: Path, objective: nn.Module) -> None:
    """Fail where the weights of ``checkpoint`` have other names or shapes; one of an older version does not name its training."""
    wanted = {name: list(tensor.shape) for name, tensor in objective.state_dict().items()}
    with safe_open(checkpoint / "model.safetensors", framework="pt") as file:
        found = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    for name in sorted(wanted | found):
        if wanted.get(name) != found.get(name):
            raise DraftsmithError(
                f"{checkpoint}: {name} is {found.get(name, 'missing')} there and {wanted.get(name, 'unknown')} in this draft, so it is "
                "another training's; move it to another folder"
            )
