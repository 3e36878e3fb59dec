"""Texts of single tokens, and which part of a long row is kept."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import chats
from draftsmith.look import pieces
from draftsmith.look.pieces import Speller


def test_a_character_of_several_tokens_belongs_to_the_last() -> None:
    chat = chats.chat(chats.CHATML)
    ids = chat.encode("a你b").ids
    # One byte a token: three for the character.
    assert len(ids) == 5
    assert Speller(chat.decode, chat.special).spell(ids) == ["a", "", "", "你", "b"]


def test_a_row_that_ends_within_a_character_and_a_sign_for_a_broken_one_lose_nothing() -> None:
    chat = chats.chat(chats.CHATML)
    speller = Speller(chat.decode, chat.special)
    ids = chat.encode("a你").ids[:-1]
    assert "".join(speller.spell(ids)) == chat.decode(ids) == "a\ufffd"
    ids = chat.encode("\ufffd\ufffd after").ids
    assert "".join(speller.spell(ids)) == "\ufffd\ufffd after"


def test_tokens_of_a_vocabulary_that_strips_the_first_space_keep_theirs() -> None:
    vocabulary = {"▁the": 0, "▁answer": 1, "s": 2, "▁": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="▁"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids)))

    # As a text of its own the second token has no space.
    assert decode([1]) == "answer"
    assert Speller(decode, frozenset()).spell([0, 1, 2, 1]) == ["the", " answer", "s", " answer"]


@pytest.mark.parametrize(
    ("length", "spans", "expected"),
    [
        (600, [(100, 600)], [(0, 600)]),
        (2000, [], [(0, 128), (1872, 2000)]),
        # Five borders, the last two in one: 128 on each side of 1000 and at both ends make 512.
        (2000, [(1000, 2000)], [(0, 128), (872, 1128), (1872, 2000)]),
        # With 128 around each of six borders too much; 64 make 64 + 256 + 64, as the first two spans grow together.
        (2000, [(100, 200)], [(0, 328), (1872, 2000)]),
    ],
)
def test_what_is_kept_by_hand(length: int, spans: list[tuple[int, int]], expected: list[tuple[int, int]]) -> None:
    assert pieces.kept(length, spans) == expected


def test_of_very_many_spans_the_first_and_the_last_are_kept() -> None:
    spans = [(at, at + 20) for at in range(100, 100_000, 100)]
    kept = pieces.kept(100_000, spans)
    assert sum(end - start for start, end in kept) <= 600
    shown = {place for start, end in kept for place in range(start, end)}
    assert {99, 100, 119, 120, 99_899, 99_900, 99_919, 99_920} <= shown
    assert 50_000 not in shown


def test_a_token_that_has_no_form_in_a_file_and_one_that_is_too_long_can_be_written() -> None:
    texts = {5: "\ud83d", 6: "-" * 200}
    speller = Speller(lambda ids: "".join(texts[token] for token in ids), frozenset())
    (run,) = pieces.parts([5, 6], [(0, 2)], speller)
    assert run["tokens"] == [[5, "?", False], [6, "-" * 79 + "…", False]]
