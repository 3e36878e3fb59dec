"""Let the dummy weights of a mixture of experts send tokens to all of its experts, as trained ones do.

vLLM draws every dummy weight from ±0.001. Scores of experts then differ by some 1e-6 and their correction biases by 1e-3, so
that every token goes to the same few experts: a step reads 8 of 384 experts, and no trained model does.
"""

from __future__ import annotations

from typing import Any

# Norms have dummy weights too, so that what a gate of width H is given has about 0.0006 a number: scores differ by
# sqrt(H) x 0.0006 x this, which is 1 for a width of 7168.
_SCALE = 20.0


def spread(model: Any) -> int:
    """Draw the gates of ``model`` anew, the same in every rank, and set their biases to 0; gives how many there were."""
    import torch

    count = 0
    for module in model.modules():
        bias, weight = getattr(module, "e_score_correction_bias", None), getattr(module, "weight", None)
        if bias is None or weight is None or weight.dim() != 2 or len(weight) != len(bias):
            continue
        drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(count)) * _SCALE
        weight.data.copy_(drawn)
        bias.data.zero_()
        count += 1
    return count
