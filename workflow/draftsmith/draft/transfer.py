"""Small tensors on their way to the GPU."""

from __future__ import annotations

import torch
from torch import Tensor


def moved(x: Tensor, device: torch.device) -> Tensor:
    """``x`` on ``device``, without waiting until what was asked of the device before is done, as a plain copy would."""
    if device.type != "cuda" or x.is_cuda:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)
