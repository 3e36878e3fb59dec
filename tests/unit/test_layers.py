"""Default layer ids, and the sentences for ids that do not fit the target."""

from __future__ import annotations

import pytest

from draftsmith.errors import DraftsmithError
from draftsmith.layers import resolve_layers


@pytest.mark.parametrize(("n", "layers"), [(7, [2, 3, 4]), (30, [2, 15, 27]), (61, [2, 30, 58])])
def test_default_layers(n: int, layers: list[int]) -> None:
    assert resolve_layers(None, n) == layers


@pytest.mark.parametrize("n", [1, 4, 5, 6])
def test_a_shallow_target_has_no_default_layers(n: int) -> None:
    with pytest.raises(DraftsmithError, match=rf"target\.layers: .* n = {n} .* too small"):
        resolve_layers(None, n)


def test_given_layers() -> None:
    assert resolve_layers([0, 15], 16) == [0, 15]
    with pytest.raises(
        DraftsmithError, match=r"target\.layers: 16 is the state behind the last of n = 16 layers.*leave 16 out"
    ):
        resolve_layers([2, 8, 13, 16], 16)
    with pytest.raises(DraftsmithError, match=r"\[17, 40\] lie outside .* n = 16 ids go from 0 to 15"):
        resolve_layers([2, 17, 40], 16)
    with pytest.raises(DraftsmithError, match="distinct and ascending"):
        resolve_layers([2, 3, 3], 16)
