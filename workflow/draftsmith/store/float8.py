"""States as float8: a byte a number, and a scale for each state of a token."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def quantise(states: Tensor) -> tuple[Tensor, Tensor]:
    """States [..., H] as float8_e4m3fn [..., H] and a float32 scale [...]: the largest |x| of each becomes 448, e4m3's largest.

    NaN and infinities stay visible in the scale.
    """
    import torch

    top = torch.finfo(torch.float8_e4m3fn).max
    scale = torch.linalg.vector_norm(states, torch.inf, dim=-1).float() / top
    # A state of zeros has no scale of its own.
    safe = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (states.float() / safe.unsqueeze(-1)).clamp(-top, top).to(torch.float8_e4m3fn), scale


def dequantise(states: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The reverse of :func:`quantise`, in ``dtype``."""
    return (states.float() * scale.unsqueeze(-1)).to(dtype)
