"""Shards share the rows out: every row once, whatever their number, and a new row moves no other."""

from __future__ import annotations

import random

import pytest

from draftsmith.errors import DraftsmithError
from draftsmith.extract_shard import plan
from draftsmith.extract_shard.plan import PlannedRow


def rows(count: int, seed: int = 0, longest: int = 300) -> list[PlannedRow]:
    source = random.Random(seed)
    return [PlannedRow(f"{seed}-{place:05d}", source.randint(1, longest)) for place in range(count)]


def lengths(batches: list[list[PlannedRow]]) -> list[list[int]]:
    return [[row.length for row in batch] for batch in batches]


def test_pack_by_hand() -> None:
    given = [PlannedRow(str(place), length) for place, length in enumerate([4, 4, 4, 12, 1, 9, 2])]
    assert lengths(plan.pack(given, 10)) == [[4, 4], [4], [12], [1, 9], [2]]


def test_a_row_longer_than_a_batch_stands_alone() -> None:
    assert lengths(plan.pack([PlannedRow("a", 99), PlannedRow("b", 1)], 10)) == [[99], [1]]


def test_pack_of_nothing() -> None:
    assert plan.pack([], 10) == []


@pytest.mark.parametrize("batch_tokens", [1, 100, 1000, 10**9])
def test_pack_keeps_every_row_in_order(batch_tokens: int) -> None:
    given = rows(500)
    batches = plan.pack(given, batch_tokens)
    assert [row for batch in batches for row in batch] == given
    assert all(sum(row.length for row in batch) <= batch_tokens or len(batch) == 1 for batch in batches)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 16, 1000])
def test_every_row_is_in_exactly_one_shard(count: int) -> None:
    given = rows(700)
    shares = [plan.share(given, f"{place}-of-{count}", 1000) for place in range(1, count + 1)]
    assert sorted((row for share in shares for row in share), key=lambda row: row.row_id) == given


@pytest.mark.parametrize("count", [2, 8])
def test_shards_get_about_the_same_number_of_tokens(count: int) -> None:
    given = rows(4000)
    tokens = [
        sum(row.length for row in plan.share(given, f"{place}-of-{count}", 2000)) for place in range(1, count + 1)
    ]
    assert max(tokens) - min(tokens) <= 2 * 2000


def test_a_share_follows_from_the_rows_alone() -> None:
    """What the store holds plays no part: shards that start at different times share nothing."""
    given = rows(300)
    mine = plan.share(given, "2-of-3", 1000)
    present = {row.row_id for row in given[::2]}
    assert plan.share(given, "2-of-3", 1000) == mine
    assert plan.missing(mine, present) == [row for row in mine if row.row_id not in present]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_copies_of_a_row_belong_to_one_shard_once(count: int) -> None:
    given = rows(100)
    copied = [*given, *given[::7], given[0]]
    shares = [plan.share(copied, f"{place}-of-{count}", 1000) for place in range(1, count + 1)]
    assert shares == [plan.share(given, f"{place}-of-{count}", 1000) for place in range(1, count + 1)]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_new_row_makes_no_other_row_missing(count: int) -> None:
    """Rows are found by their content, so an inserted one costs its own extraction, wherever the others now belong."""
    before = rows(200)
    store = {row.row_id for row in before}
    new = PlannedRow("new", 50)
    after = [*before[:3], new, *before[3:]]
    shares = [plan.share(after, f"{place}-of-{count}", 1000) for place in range(1, count + 1)]
    assert [row for share in shares for row in plan.missing(share, store)] == [new]


@pytest.mark.parametrize(("text", "expected"), [("1-of-1", (0, 1)), ("2-of-8", (1, 8)), ("8-of-8", (7, 8))])
def test_scatteritem(text: str, expected: tuple[int, int]) -> None:
    assert plan.parse_scatteritem(text) == expected


@pytest.mark.parametrize("text", ["0-of-2", "3-of-2", "1", "a-of-b", "1-of-", "", "1-of-2-of-3", "-1-of-2"])
def test_a_scatteritem_that_is_none(text: str) -> None:
    with pytest.raises(DraftsmithError, match="write it as 1-of-1"):
        plan.parse_scatteritem(text)
