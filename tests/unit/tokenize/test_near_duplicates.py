"""near_duplicates: similar conversations are found, in whatever order they come."""

from __future__ import annotations

import hashlib
import itertools
import random
import tracemalloc
from array import array
from dataclasses import replace

import numpy as np
import pytest

import chats
from draftsmith.conversations import Conversation
from draftsmith.conversations.tokenised import Tokenised
from draftsmith.tokenize.near_duplicates import PERMUTATIONS, Near, NearDuplicates, find, signature

WORDS = [f"word{number}" for number in range(2000)]
# Of the signature of text(1); another release of datasketch or xxhash must not change it unseen.
DIGEST = "0db987c543368df9"


def text(seed: int, words: int = 300) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def said(answer: str, name: str = "c", **more: object) -> Conversation:
    return chats.talk("tell me", answer, name=name, **more)  # type: ignore[arg-type]


def jaccard(one: Conversation, two: Conversation) -> float:
    """The similarity that is estimated, from the definition."""
    sets = []
    for given in (one, two):
        words = " ".join(message["content"] for message in given.messages).lower().split()
        sets.append({tuple(words[start : start + 5]) for start in range(len(words) - 4)})
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def estimate(one: Conversation, two: Conversation) -> float:
    first, second = (np.frombuffer(signature(given), dtype="<u4") for given in (one, two))
    assert len(first) == PERMUTATIONS
    return float(np.equal(first, second).mean())


@pytest.mark.parametrize("changed", [0, 1, 3, 10, 40])
def test_the_estimate_is_near_the_definition(changed: int) -> None:
    """Three standard errors of a mean of 128 yes-or-no are at most 0.133."""
    words = text(1).split()
    for place in range(changed):
        words[place * 7 + 3] = "other"
    one, two = said(text(1)), said(" ".join(words))
    assert abs(estimate(one, two) - jaccard(one, two)) <= 0.133
    assert (estimate(one, two) == 1) == (changed == 0)


def test_a_signature_is_the_same_on_every_machine_and_of_content_alone() -> None:
    given = said(text(1))
    assert hashlib.sha256(signature(given)).hexdigest()[:16] == DIGEST
    assert signature(given) == signature(said(text(1), name="other", split="train"))
    assert signature(given) == signature(said(text(1).upper().replace(" ", ", ")))
    assert signature(given) != signature(said(text(2)))


def test_a_system_message_does_not_count() -> None:
    """A long one that a whole data set shares would make all of it similar."""
    shared = text(9, 3000)
    assert estimate(said(text(1), system=shared), said(text(2), system=shared)) < 0.1
    assert signature(said(text(1), system=shared)) == signature(said(text(1)))


def test_all_that_is_said_counts() -> None:
    plain = chats.talk("q", "a")
    assert signature(chats.talk("q", "thought >> a")) != signature(plain)
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    called = Conversation("c", "s", "d", [*plain.messages[:1], plain.messages[1] | {"tool_calls": [call]}])
    assert signature(called) != signature(plain)


def test_other_scripts_and_signs() -> None:
    """Without spaces each character counts, so that one of fifty changes little; signs alone are no empty set."""
    line = "".join(chr(0x4E00 + number) for number in range(50))
    assert 0.6 < estimate(said(line), said(line[:25] + "\u4dff" + line[26:])) < 1
    assert signature(chats.talk("?", "!")) != signature(chats.talk("?", ":)"))


def test_tokens_are_compared_too() -> None:
    ids = list(range(100, 200))
    given = [Tokenised("t", "s", "d", array("i", values), [(50, 100)]) for values in (ids, [*ids[:99], 7], ids[::-1])]
    first, near, far = (np.frombuffer(signature(one), dtype="<u4") for one in given)
    assert np.equal(first, near).mean() > 0.9
    assert np.equal(first, far).mean() < 0.1


def left(conversations: list[Conversation], threshold: float = 0.8) -> dict[str, tuple[str, float]]:
    near = NearDuplicates()
    for number, given in enumerate(conversations):
        near.add(number, replace(given, where=given.conversation_id), signature(given), 1)
    return {one.where: (kept.where, similar) for one, kept, similar in near.find(threshold)}


def lot(size: int, seed: int) -> list[Conversation]:
    """Conversations that differ from one another in one word of 300, so of a similarity of about 0.97."""
    return [said(f"{text(seed)} end{number}", name=f"{seed}-{number}") for number in range(size)]


def test_of_a_lot_the_first_by_content_is_kept_whatever_the_order() -> None:
    given = [*lot(4, 1), *lot(3, 2), *[said(text(seed), name=f"alone-{seed}") for seed in range(10, 30)]]
    kept = [min(one, key=lambda member: member.content_key()) for one in (given[:4], given[4:7])]
    expected = {member.conversation_id for member in given[:7]} - {one.conversation_id for one in kept}
    for order in (given, given[::-1], random.Random(0).sample(given, len(given))):
        found = left(order)
        assert set(found) == expected
        assert all(kept[0 if name.startswith("1-") else 1].conversation_id == like for name, (like, _) in found.items())
        assert all(similar > 0.9 for _, similar in found.values())
    # Others that come or go change nothing of that.
    assert set(left([*given, said(text(99), name="new")])) == expected


def test_what_is_to_be_evaluated_is_kept() -> None:
    for wished, other in itertools.product(lot(4, 1), repeat=2):
        if wished is not other:
            asked = said(wished.messages[1]["content"], name="asked", split="evaluation")
            assert set(left([other, asked])) == {other.conversation_id}


@pytest.mark.parametrize(("threshold", "found"), [(0.5, 1), (0.9, 0), (1.0, 0)])
def test_the_threshold(threshold: float, found: int) -> None:
    """Ten words of 300, five runs each: of 350 runs 250 are common, 0.71."""
    words = text(1).split()
    words[5:300:30] = ["other"] * 10
    assert len(left([said(text(1)), said(" ".join(words), name="changed")], threshold)) == found
    # Where all runs are the same, any threshold is reached.
    assert len(left([said(text(1)), said(text(1), system="x", name="same")], threshold)) == 1


@pytest.mark.parametrize("threshold", [0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
def test_pairs_at_the_threshold_are_found(threshold: float) -> None:
    """1,000 pairs of exactly that similarity: by the banding's own arithmetic no more than 1 in 100 is missed."""
    numbers = np.random.default_rng(0)
    equal = -(-int(threshold * PERMUTATIONS * 1000) // 1000)
    one = numbers.integers(0, 1 << 32, (1000, PERMUTATIONS), dtype=np.uint32)
    two = one.copy()
    for row in two:
        row[numbers.permutation(PERMUTATIONS)[equal:]] ^= 1
    similar = equal / PERMUTATIONS
    found = find(np.concatenate([one, two]), range(2000), min(threshold, similar))
    assert len(found) >= 980
    assert all(found[number] == Near(number - 1000, similar) for number in found)


def test_a_hundred_thousand_take_little_memory() -> None:
    """Signatures are 51 MB; telling apart 100,000 different ones takes less than 100 MB more."""
    signatures = np.random.default_rng(0).integers(0, 1 << 32, (100_000, PERMUTATIONS), dtype=np.uint32)
    tracemalloc.start()
    assert find(signatures, range(len(signatures)), 0.8) == {}
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100e6
