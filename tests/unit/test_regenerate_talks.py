"""Conversations turn by turn: where they are cut, what an answer's text holds, and tool calls that fit or not."""

from __future__ import annotations

from typing import Any

import pytest

import chats
from draftsmith.chat import Chat
from draftsmith.conversations import Conversation, Unusable
from draftsmith.regenerate import answers, talks
from test_regenerate_endpoint import row

TOOLS = [{"type": "function", "function": {"name": "sky"}}]


def call(name: str, number: str, **arguments: Any) -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("given", "cut"),
    [
        (["u: a"], [["a"]]),
        (["s: s", "u: a", "a: x", "u: b"], [["s", "a"], ["b"]]),
        (["u: a", "u: b"], [["a"], ["b"]]),
        (["a: hello", "u: a", "a: x"], [["a"]]),
        # Replies to two calls at once, and to two calls after one another.
        (["u: a", "a: x", "t: 1", "t: 2", "a: y"], [["a"], ["1", "2"]]),
        (["u: a", "a: x", "t: 1", "a: y", "t: 2", "a: z"], [["a"], ["1"], ["2"]]),
        (["u: a", "a: x", "s: late"], [["a"]]),
        (["s: s"], []),
        ([], []),
    ],
)
def test_parts(given: list[str], cut: list[list[str]]) -> None:
    assert [[message["content"] for message in part.messages] for part in talks.parts(row(*given)["messages"])] == cut


@pytest.mark.parametrize(
    ("text", "opened", "content", "reasoning"),
    [
        ("fine", False, "fine", ""),
        ("<think>\nhm\n</think>\n\nfine", False, "fine", "hm"),
        ("hm</think>fine", True, "fine", "hm"),
        ("hm\n</think>\n\nfine", True, "fine", "hm"),
        ("still thin", True, "", "still thin"),
        ("<think>still", False, "", "still"),
        ("say </think> aloud", False, "say </think> aloud", ""),
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>fine",
            False,
            "fine",
            "hm",
        ),
        ("<|channel|>analysis<|message|>still", False, "", "still"),
    ],
)
def test_split_reasoning(text: str, opened: bool, content: str, reasoning: str) -> None:
    assert answers.split_reasoning(text, opened=opened) == (content, reasoning)


@pytest.mark.parametrize(
    ("tail", "message", "finish", "content", "reasoning"),
    [
        ("", {"content": "fine", "reasoning_content": "\nhm\n"}, "stop", "fine", "hm"),
        # A server that leaves reasoning where it is, with a template that opens it and one that does not.
        ("<think>\n", {"content": "hm\n</think>\n\nfine"}, "stop", "fine", "hm"),
        ("", {"content": "<think>hm</think>fine"}, "stop", "fine", "hm"),
        ("<think>\n", {"content": "still thin"}, "length", "", "still thin"),
        # One that takes it out, where there was none.
        ("<think>\n", {"content": "fine"}, "stop", "fine", None),
        ("", {"content": None, "reasoning_content": "hm"}, "length", "", "hm"),
    ],
)
def test_reasoning_in_a_servers_message(
    tail: str, message: dict[str, Any], finish: str, content: str, reasoning: str | None
) -> None:
    found = answers.from_message(tail, message, None, finish, 7)
    assert (found["content"], found.get("reasoning_content"), found["tokens"]) == (content, reasoning, 7)


def test_calls_in_a_servers_message() -> None:
    given = {
        "content": "",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "sky", "arguments": '{"of": "Rome"}'}}],
    }
    found = answers.from_message("", given, [5, 6], "tool_calls", 2)
    assert found["tool_calls"] == [call("sky", "c1", of="Rome")]
    assert found["token_ids"] == [5, 6]
    assert not answers.is_empty(found)
    given["tool_calls"][0]["function"]["arguments"] = "{of:"
    with pytest.raises(Unusable, match=r"bad_tools.*sky"):
        answers.from_message("", given, None, "tool_calls", 2)


def test_half_a_surrogate_pair_in_a_servers_message() -> None:
    with pytest.raises(Unusable, match="bad_unicode"):
        answers.from_message("", {"content": "\ud83d"}, None, "stop", 1)


def tool_talk() -> talks.Talk:
    """The source called sky, had a reply, answered, and was asked once more."""
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call("sky", "source-1")]},
        {"role": "tool", "content": "blue", "tool_call_id": "source-1"},
        {"role": "assistant", "content": "It is blue."},
        {"role": "user", "content": "r"},
    ]
    return talks.start(Conversation("c", "s", "d", messages, TOOLS))


def said(content: str, *calls: dict[str, Any], finish: str = "stop") -> dict[str, Any]:
    return {"content": content, "finish_reason": finish, **({"tool_calls": list(calls)} if calls else {})}


def test_a_reply_follows_the_same_call_with_its_new_id() -> None:
    talk = tool_talk()
    talk.take(said("", call("sky", "target-9", of="Rome")))
    assert talk.ended is None
    assert talk.messages(asking=True)[1:] == [
        {"role": "assistant", "content": "", "tool_calls": [call("sky", "target-9", of="Rome")]},
        {"role": "tool", "content": "blue", "tool_call_id": "target-9"},
    ]
    talk.take(said("Blue."))
    talk.take(said("Bye."))
    assert (talk.finished, talk.ended) == (True, None)


@pytest.mark.parametrize(
    ("answer", "ended"),
    [
        (said("", call("sea", "1")), "calls_differ"),
        (said("", call("sky", "1"), call("sky", "2")), "calls_differ"),
        (said("I cannot look."), "calls_differ"),
        # In the target's own words, as nobody took the call apart.
        (said('<tool_call>{"name": "sky"}</tool_call>'), None),
    ],
)
def test_a_reply_to_nothing_is_not_sent(answer: dict[str, Any], ended: str | None) -> None:
    talk = tool_talk()
    talk.take(answer)
    assert (talk.ended, len(talk.answers)) == (ended, 1)


def test_a_call_that_the_source_did_not_make_is_not_followed_by_its_next_question() -> None:
    talk = tool_talk()
    talk.take(said("", call("sky", "1")))
    talk.take(said("", call("sky", "2")))
    assert (talk.ended, len(talk.answers), len(talk.messages())) == ("calls_differ", 2, 4)


def test_two_replies_in_another_order_than_the_calls() -> None:
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call("sky", "a"), call("sea", "b")]},
        {"role": "tool", "content": "wet", "tool_call_id": "b"},
        {"role": "tool", "content": "blue", "tool_call_id": "a"},
    ]
    talk = talks.start(Conversation("c", "s", "d", messages, TOOLS))
    talk.take(said("", call("sky", "x"), call("sea", "y")))
    assert [(m["content"], m["tool_call_id"]) for m in talk.messages(asking=True)[2:]] == [("wet", "y"), ("blue", "x")]


def test_replies_without_ids_go_by_order() -> None:
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call("sky", ""), call("sea", "")]},
        {"role": "tool", "content": "blue"},
        {"role": "tool", "content": "wet"},
    ]
    assert talks.parts(messages)[1].called == ["sky", "sea"]
    # Nothing tells what was called: the reply is taken to fit.
    talk = talks.start(chats.talk("q"))
    unknown = talks.start(Conversation("c", "s", "d", row("u: q", "a: x", "t: 1")["messages"]))
    unknown.take(said("whatever"))
    assert unknown.ended is None
    assert talk.parts[0].called == []


def test_reasoning_that_was_cut_is_kept_but_not_followed() -> None:
    talk = talks.start(chats.talk("q", "x", "r"))
    talk.take({"content": "", "reasoning_content": "hm", "finish_reason": "length", "token_ids": [1]})
    assert (talk.ended, talk.finished, len(talk.answers)) == ("truncated", True, 1)


def test_seeds_are_the_conversations_own() -> None:
    one, two = (talks.start(chats.talk(text)) for text in ("a", "b"))
    assert one.seed(0) == talks.start(chats.talk("a", "an answer")).seed(0)
    assert len({one.seed(0), one.seed(1), two.seed(0)}) == 3
    one.answers.append({})
    assert one.seed(0) != talks.start(chats.talk("a")).seed(0)


def test_an_answer_keeps_what_is_no_end_of_turn() -> None:
    chat = Chat(chats.slow(chats.CHATML), {})
    found = answers.from_ids(chat, "", [72, 105, 1001], "stop", chat.end_ids)
    assert found == {"content": "Hi", "token_ids": [72, 105, 1001], "finish_reason": "stop"}
    assert answers.from_ids(chat, "", [72, 105], "length", chat.end_ids)["content"] == "Hi"


def test_token_ids_are_noted_only_where_they_are_known() -> None:
    talk = talks.start(chats.talk("q", "x", "r"))
    talk.take(said("one"))
    talk.take(said("two"))
    assert talks.completed(talk, "mine").generated == {"fingerprint": "mine", "finish_reasons": ["stop", "stop"]}
    talk.answers[1]["token_ids"] = [7]
    noted = talks.completed(talk, "mine").generated
    assert noted is not None
    assert noted["token_ids"] == [None, [7]]
