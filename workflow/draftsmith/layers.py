"""Which layers' inputs are captured. Layer k stands for the residual stream that enters layer k, as vLLM counts."""

from __future__ import annotations

from draftsmith.errors import DraftsmithError


def resolve_layers(layers: list[int] | None, num_layers: int) -> list[int]:
    """Check layer ids against the target's depth ``num_layers``; None gives the default [2, n//2, n-3].

    n-1 is the last layer; n would be what leaves it, which is stored anyhow, after the final norm.
    """
    n = num_layers
    if layers is None:
        layers = [2, n // 2, n - 3]
        if not 0 <= layers[0] < layers[1] < layers[2]:
            raise DraftsmithError(
                f"target.layers: a target of n = {n} layers is too small for the default [2, n//2, n-3], which would "
                f"be {layers}; give distinct ascending ids between 0 and {n - 1}"
            )
    if n in layers:
        raise DraftsmithError(
            f"target.layers: {n} is the state behind the last of n = {n} layers, which is always stored besides, after "
            f"the final norm; leave {n} out of {layers}"
        )
    outside = [layer for layer in layers if not 0 <= layer < n]
    if outside:
        raise DraftsmithError(
            f"target.layers: {outside} lie outside of the target's layers; with n = {n} ids go from 0 to {n - 1}"
        )
    if sorted(set(layers)) != layers:
        raise DraftsmithError(f"target.layers: ids must be distinct and ascending, {layers} are not; n = {n}")
    return layers
