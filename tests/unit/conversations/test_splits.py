"""splits: stable, together, and never without training rows."""

from __future__ import annotations

import hashlib

import pytest

from draftsmith.conversations.splits import Group, assign, share


def groups(count: int, domain: str = "d", **more: bool | str) -> dict[str, Group]:
    return {
        f"{domain}{number}": Group(domain, conversations=1, rows=1, **({"eligible": True} | more))
        for number in range(count)
    }


def count(splits: dict[str, str]) -> dict[str, int]:
    return {split: list(splits.values()).count(split) for split in ("train", "validation", "evaluation")}


def test_share_by_hand() -> None:
    first = int.from_bytes(hashlib.sha256(b"7/validation/k").digest()[:8], "big")
    assert share(7, "validation", "k") == (first >> 11) / 2**53
    assert share(7, "evaluation", "k") != share(7, "validation", "k") != share(8, "validation", "k")


def test_numbers() -> None:
    found = assign(groups(100) | groups(50, "e"), per_domain=6, fraction=0.1, seed=0)
    assert count(found)["evaluation"] == 12
    assert sum(key.startswith("e") and split == "evaluation" for key, split in found.items()) == 6
    assert 5 <= count(found)["validation"] <= 25
    assert sum(count(found).values()) == 150


def test_other_rows_change_nothing() -> None:
    few, many = groups(200), groups(400)
    before = assign(few, per_domain=0, fraction=0.1, seed=3)
    after = assign(dict(reversed(many.items())), per_domain=0, fraction=0.1, seed=3)
    assert before == {key: after[key] for key in few}
    assert before != assign(few, per_domain=0, fraction=0.1, seed=4)


def test_evaluation_takes_the_first_by_hash() -> None:
    given = groups(30)
    found = assign(given, per_domain=4, fraction=0.0, seed=0)
    order = sorted(given, key=lambda key: share(0, "evaluation", key))
    assert {key for key, split in found.items() if split == "evaluation"} == set(order[:4])
    given[order[0]].eligible = False
    found = assign(given, per_domain=4, fraction=0.0, seed=0)
    assert {key for key, split in found.items() if split == "evaluation"} == set(order[1:5])


@pytest.mark.parametrize(("size", "evaluated"), [(1, 0), (2, 0), (3, 1), (8, 2), (18, 6), (100, 6)])
def test_a_small_domain_keeps_most_to_train_on(size: int, evaluated: int) -> None:
    assert count(assign(groups(size), per_domain=6, fraction=0.0, seed=0))["evaluation"] == evaluated


def test_at_least_one_of_each() -> None:
    for seed in range(20):
        assert count(assign(groups(2), per_domain=0, fraction=0.01, seed=seed)) == {
            "train": 1,
            "validation": 1,
            "evaluation": 0,
        }
        assert count(assign(groups(2), per_domain=0, fraction=0.99, seed=seed)) == {
            "train": 1,
            "validation": 1,
            "evaluation": 0,
        }
        assert count(assign(groups(1), per_domain=0, fraction=0.5, seed=seed)) == {
            "train": 1,
            "validation": 0,
            "evaluation": 0,
        }
        assert count(assign(groups(5), per_domain=0, fraction=0.0, seed=seed))["validation"] == 0


def test_wishes_are_kept() -> None:
    given = (
        groups(10)
        | groups(1, "t", wished="train")
        | groups(2, "v", wished="validation")
        | groups(1, "w", wished="evaluation")
    )
    found = assign(given, per_domain=2, fraction=1.0, seed=0)
    assert (found["t0"], found["v0"], found["v1"], found["w0"]) == ("train", "validation", "validation", "evaluation")
    # Those that are wished count towards the number wanted.
    given = groups(10)
    given["d0"].wished = given["d1"].wished = "evaluation"
    assert count(assign(given, per_domain=2, fraction=0.0, seed=0))["evaluation"] == 2


def test_what_has_no_rows_is_left_out() -> None:
    given = groups(4)
    given["d1"].rows = 0
    given["d1"].eligible = False
    assert set(assign(given, per_domain=1, fraction=0.5, seed=0)) == {"d0", "d2", "d3"}


def test_what_gave_no_rows_is_no_part_of_its_domain() -> None:
    """Six usable conversations and thirty that were left out: two of the six are evaluated, as if they were alone."""
    usable = {f"u{place}": Group("d", eligible=True, rows=1, conversations=1) for place in range(6)}
    lost = {f"l{place}": Group("d") for place in range(30)}
    found = assign(usable | lost, per_domain=6, fraction=0.0, seed=0)
    assert count(found) == {"train": 4, "validation": 0, "evaluation": 2}
    assert found == assign(usable, per_domain=6, fraction=0.0, seed=0)
