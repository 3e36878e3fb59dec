"""Packs read ahead: several at once, in their order, errors where they belong."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from draftsmith.errors import DraftsmithError
from draftsmith.train_draft.ahead import Ahead


def test_order_is_the_plans_whoever_reads_faster() -> None:
    """The first pack is only ready when the second has been read."""
    second = threading.Event()

    def read(numbers: Sequence[int]) -> int:
        if numbers[0] == 0:
            assert second.wait(10)
        if numbers[0] == 1:
            second.set()
        return numbers[0]

    ahead = Ahead(read, threads=2)
    assert [batch["pack"] for batch in ahead.ordered(ahead.submit([number]) for number in range(5))] == [0, 1, 2, 3, 4]
    ahead.close()


def test_only_so_many_are_begun() -> None:
    begun: list[int] = []
    ahead = Ahead(lambda numbers: begun.append(numbers[0]), threads=3)
    packs = ahead.ordered(ahead.submit([number]) for number in range(10))
    next(packs)
    next(packs)
    ahead.close()
    assert len(begun) <= 5


def test_an_error_comes_where_its_pack_would() -> None:
    def read(numbers: Sequence[int]) -> int:
        if numbers[0] == 2:
            raise DraftsmithError("row 2 is gone")
        return numbers[0]

    ahead = Ahead(read, threads=4)
    packs = ahead.ordered(ahead.submit([number]) for number in range(4))
    assert [next(packs)["pack"], next(packs)["pack"]] == [0, 1]
    with pytest.raises(DraftsmithError, match="row 2 is gone"):
        next(packs)
    ahead.close()
