"""Rows of conversations that are rendered and encoded together: as those of each alone."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

import chats
from draftsmith.chat import Chat
from draftsmith.config import Tokenize
from draftsmith.conversations import Conversation
from draftsmith.conversations.tokenised import Tokenised
from draftsmith.tokenize.make_rows import Made, Plan, RowMaker
from draftsmith.tokenize.marks import learn_marks
from draftsmith.tokenize.masking import METHODS, Method
from kinds import KINDS
from mask_cases import CONVERSATIONS


def maker(chat: Chat, method: Method = "prefix", **settings: Any) -> RowMaker:
    target = {"vocab_size": 1200, "fingerprint": "mine", "path": "nowhere"}
    return RowMaker(Plan(target, Tokenize(min_supervised_tokens=1, **settings), method, learn_marks(chat)), chat)


def plain(made: list[Made]) -> list[tuple[Any, ...]]:
    return [
        (one.reason, one.detail, one.rows, one.straddled, one.special, one.prompt_tokens, one.by_turn) for one in made
    ]


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "slow"])
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_template(name: str, fast: bool) -> None:
    kind = KINDS[name]
    given = [*CONVERSATIONS.values()] * 2
    for arguments in (kind.plain, kind.thinking):
        alone = [maker(kind.chat(arguments, fast=fast)).make(one) for one in given]
        together = maker(kind.chat(arguments, fast=fast)).make_together(given)
        assert plain(together) == plain(alone)
        assert len({one.reason for one in together}) > 1


@pytest.mark.parametrize("method", METHODS)
def test_every_way_of_finding_answers(method: Method) -> None:
    given = [chats.talk("hi", "The answer", "what?", "It is 3."), chats.talk("hi", ""), chats.talk("hi", "A" * 30)]
    alone = [maker(chats.chat(chats.TAGGED), method).make(one) for one in given]
    together = maker(chats.chat(chats.TAGGED), method).make_together(given)
    assert plain(together) == plain(alone)
    assert [one.reason for one in together] == ["", "empty_answer", ""]


def test_what_is_left_over_is_no_other_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is turned away before it is looked for leaves its texts behind; the next takes none of them."""
    made = maker(chats.chat(chats.CHATML), max_turns=1)
    many, one = chats.talk("hi", "A", "so", "B"), chats.talk("hi", "C")
    assert [each.reason for each in made.make_together([many, one])] == ["too_many_turns", ""]
    assert made._masker._rendered
    again = made.make_together([chats.talk("hi", "D")])
    assert not made._masker._rendered
    assert plain(again) == plain([maker(chats.chat(chats.CHATML)).make(chats.talk("hi", "D"))])


def test_rows_of_tokens_go_beside_them() -> None:
    tokens = Tokenised("t", "test", "general", array("i", [5, 6, 7]), [(1, 3)])
    made = maker(chats.chat(chats.CHATML)).make_together([tokens, chats.talk("hi", "A")])
    assert list(made[0].rows[0].ids) == [5, 6, 7]
    assert made[1].rows


def test_they_are_encoded_at_once_and_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = chats.chat(chats.CHATML)
    chat._compared = 1 << 30
    made = maker(chat)
    given: list[Conversation] = [chats.talk(f"hi {number}", "A", "so", "B") for number in range(20)]
    made.make_together(given[:1])
    calls: list[Any] = []
    encode, render = type(chat.tokenizer)._encode_plus, chat.tokenizer.apply_chat_template
    monkeypatch.setattr(
        type(chat.tokenizer),
        "_encode_plus",
        lambda self, *args, **more: calls.append("encode") or encode(self, *args, **more),
    )
    monkeypatch.setattr(
        chat.tokenizer, "apply_chat_template", lambda *args, **more: calls.append("render") or render(*args, **more)
    )
    assert all(one.rows for one in made.make_together(given))
    assert (calls.count("encode"), calls.count("render")) == (1, 20)


def test_a_text_that_cannot_be_encoded_with_others_is_tried_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = chats.chat(chats.CHATML)
    made = maker(chat)

    def fail(texts: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(chat, "encode_many", fail)
    assert all(one.rows for one in made.make_together([chats.talk("hi", "A"), chats.talk("hi", "B")]))
