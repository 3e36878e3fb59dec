"""What the draft's layer is made of besides its matrices."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import rotate_half


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in float32 whatever comes in."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis; float32, or float64 where that comes in."""
        return functional.rms_norm(
            x.to(torch.promote_types(x.dtype, torch.float32)), self.weight.shape, self.weight, self.eps
        )


def cast(x: Tensor) -> Tensor:
    """``x`` in the precision of the matrix products that take it: once, and half as large, where several do."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [T, heads, d] by cos and sin [T, 1, d]; keeps the dtype of ``x``."""
    return (x * cos + rotate_half(x) * sin).to(x.dtype)
