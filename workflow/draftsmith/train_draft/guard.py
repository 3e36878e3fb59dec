"""Losses and gradients that are no finite numbers: their rows are named, and the step is left out or the training ends.

A validation is looked at too. Packs whose stored states are to blame can be left out of it, each time the same ones; where
the states are sound the draft itself is to blame, and then the validation gives no figures.
"""

from __future__ import annotations

import sys
from typing import Any, Literal

import torch
from torch import Tensor, nn

from draftsmith.errors import DraftsmithError
from draftsmith.log import log
from draftsmith.train_draft.packing import Pack

Policy = Literal["stop", "skip"]
# A draft whose weights have diverged gives no finite loss ever again.
_IN_A_ROW = 10
_SHOWN = 8
_DIVERGED = "training has diverged: lower train.learning_rate"


class Guard:
    """Looks at every loss and at every gradient before the optimiser takes it.

    A pack with a bad loss makes the gradient bad on every process, through the sum of gradients; so all processes see the same
    norm, and decide the same, without a word to each other in the good case.
    """

    def __init__(self, policy: Policy, skipped: list[dict[str, Any]] | None = None) -> None:
        """``skipped`` are the steps that were left out before the checkpoint that is resumed from."""
        self.policy = policy
        self.skipped = list(skipped or [])
        self._packs: list[Pack] = []
        self._causes: list[dict[str, Any]] = []
        self._in_a_row: list[bool] = []
        self._validated: list[dict[str, Any]] = []
        self._told: list[str] = []

    def look_at_loss(self, pack: Pack, loss: Tensor) -> bool:
        """Whether the loss of ``pack`` is finite; the pack is remembered until the step ends."""
        self._packs.append(pack)
        if torch.isfinite(loss):
            return True
        bad = _not_finite(pack)
        self._causes.append({"rows": bad or pack.row_ids, "stored": bool(bad)})
        return False

    def look_at_gradient(self, norm: Tensor, model: nn.Module, step: int) -> bool:
        """Whether the gradient's ``norm`` is finite; else the step is left out, or :class:`DraftsmithError` raised, by the policy."""
        packs, causes = self._packs, self._causes
        self._packs, self._causes = [], []
        if torch.isfinite(norm):
            self._in_a_row = []
            return True
        rows, stored = _blamed(causes, [row for pack in packs for row in pack.row_ids])
        why = _sentence(f"training step {step}: its loss or gradient is not finite", rows, stored)
        self._in_a_row.append(stored)
        if self.policy == "stop":
            _end(f"{why}, or leave such steps out with train.on_bad_loss: skip")
        if len(self._in_a_row) >= _IN_A_ROW:
            # Where each had rows of bad states the draft has not had a chance to diverge.
            diverged = "" if all(self._in_a_row) or not stored else f", not all of them for such rows: {_DIVERGED}"
            _end(f"{why}; {_IN_A_ROW} steps in a row were left out{diverged}")
        self.skipped.append({"step": step, "rows": rows})
        if _first():
            log(f"{why}; the step is left out")
        # An optimiser passes over weights without a gradient: neither they nor their moments change.
        for parameter in model.parameters():
            parameter.grad = None
        return False

    def look_at_validation(self, pack: Pack, sums: Tensor) -> bool:
        """Whether the cross-entropies ``sums`` of a validation pack are finite; if not, why is remembered until the end."""
        if bool(torch.isfinite(sums).all()):
            return True
        bad = _not_finite(pack)
        self._validated.append({"rows": bad or pack.row_ids, "stored": bool(bad), "left": len(pack.row_ids)})
        return False

    def end_validation(self, step: int) -> tuple[int, bool]:
        """How many rows of all processes were left out, and whether the others are worth a figure; or the end, by the policy.

        All processes call this. What is left out is told once, as long as it stays the same.
        """
        causes = [cause for part in _gathered(self._validated) for cause in part]
        self._validated = []
        if not causes:
            return 0, True
        to_blame = [cause for cause in causes if not cause["stored"]]
        stored = not to_blame
        rows = [row for cause in to_blame or causes for row in cause["rows"]]
        why = _sentence(f"validation at step {step}: its loss is not finite", rows, stored)
        if self.policy == "stop":
            _end(f"{why}, or leave the packs of such rows out with train.on_bad_loss: skip" if stored else why)
        if _first() and rows != self._told:
            log(f"{why}; " + ("their packs are left out of every validation" if stored else "it gives no figures"))
        self._told = rows
        return sum(cause["left"] for cause in causes), stored


def _not_finite(pack: Pack) -> list[str]:
    """Rows of a pack whose stored states are not finite."""
    bad, key, entry = [], 0, 0
    for row, width, counted in zip(pack.row_ids, pack.widths, pack.counted, strict=True):
        states = (pack.aux[key : key + width], pack.final[entry : entry + counted])
        if not all(bool(torch.isfinite(part).all()) for part in states):
            bad.append(row)
        key, entry = key + width, entry + counted
    return bad


def _blamed(causes: list[dict[str, Any]], rows: list[str]) -> tuple[list[str], bool]:
    """Rows of all processes that made a step bad, and whether their stored states did.

    Those with bad states where there are any, as they explain the others; else those of packs with a bad loss; else all.
    """
    told = _gathered((causes, rows))
    found = [cause for part, _ in told for cause in part]
    found = [cause for cause in found if cause["stored"]] or found
    if not found:
        return [row for _, part in told for row in part], False
    return [row for cause in found for row in cause["rows"]], bool(found[0]["stored"])


def _gathered(mine: Any) -> list[Any]:
    """``mine`` of every process, in their order."""
    told = [mine]
    if _spread():
        told = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(told, mine)
    return told


def _sentence(what: str, rows: list[str], stored: bool) -> str:
    named = ", ".join(rows[:_SHOWN]) + (f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else "")
    if stored:
        return (
            f"{what}, because the stored states of these rows are not finite: {named}; move their batch files, which "
            "results/NAME/extract/manifest.json names, out of the store and run snakemake with --forcerun extract_shard"
        )
    return f"{what}, though the states of its rows are (rows {named}); {_DIVERGED}"


def _spread() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _first() -> bool:
    return not _spread() or torch.distributed.get_rank() == 0


def _end(sentence: str) -> None:
    """End the training: the first process says why."""
    if _first():
        raise DraftsmithError(sentence)
    sys.exit(1)
