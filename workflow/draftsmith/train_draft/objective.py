"""What is trained: the draft with its loss, as one module that DDP can wrap."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from draftsmith.draft.loss import Loss, fast_loss
from draftsmith.draft.model import Eagle3Draft
from draftsmith.draft.teacher import Teacher
from draftsmith.train_draft.packing import Pack


class Objective(nn.Module):
    """The draft's loss on a pack. Weights are float32; matrix products are in ``dtype``; the loss is float32."""

    # Trainer: the loss is already divided by what the whole group counts.
    accepts_loss_kwargs = True

    def __init__(
        self,
        draft: Eagle3Draft,
        teacher: Teacher,
        steps: int,
        decay: float,
        dtype: torch.dtype,
        fuse: bool = False,
    ) -> None:
        """``fuse`` is as in :func:`draftsmith.draft.loss.fast_loss`."""
        super().__init__()
        self.draft = draft
        self.steps = steps
        self.decay = decay
        self.dtype = dtype
        self.fuse = fuse
        # Not a submodule: it is neither trained nor saved. It follows the packs to their device.
        self._teacher = [teacher]

    def forward(self, pack: Pack, counts: Tensor, with_hits: bool = False) -> Loss:
        """The share of ``pack`` in the loss of an optimiser step in which ``counts`` [steps] slots count."""
        device = pack.final.device
        teacher = self._teacher[0]
        if teacher.head.device != device:
            teacher.to(device)
        with torch.autocast(device.type, dtype=self.dtype, enabled=self.dtype != torch.float32):
            states = self.draft(pack, self.steps)
            head = self.draft.lm_head.weight
            return fast_loss(states, pack.depth, pack.final, head, teacher, counts, self.decay, with_hits, self.fuse)
