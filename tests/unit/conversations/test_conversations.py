"""conversations: every shape in one shape, and a reason for what is left out."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from draftsmith.conversations import Conversation, Unusable, normalise
from draftsmith.conversations.sources import RawRow

USER = {"role": "user", "content": "u"}
ANSWER = {"role": "assistant", "content": "a"}


def shape(row: Any) -> Conversation:
    found = normalise(RawRow("f.jsonl", "line 7", row), "f.jsonl", "general")
    assert isinstance(found, Conversation)
    return found


def messages(*given: Any) -> list[dict[str, Any]]:
    return shape({"messages": list(given)}).messages


def reason(row: Any) -> str:
    with pytest.raises(Unusable) as caught:
        shape(row)
    return caught.value.reason


def test_openai_messages() -> None:
    found = shape({"messages": [USER, ANSWER], "id": 5, "domain": "code", "extra": 1})
    assert found == Conversation("5", "f.jsonl", "code", [USER, ANSWER])
    assert shape([USER]).conversation_id == "f.jsonl:7"


def test_null_content() -> None:
    """As OpenAI has it beside tool calls; an assistant that says nothing is found by masking."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    found = messages(USER, {"role": "assistant", "content": None, "tool_calls": [call]})
    assert found[1]["content"] == ""
    assert messages(USER, {"role": "assistant", "content": None})[1] == {"role": "assistant", "content": ""}
    assert messages({"role": "system", "content": None}, USER) == [USER]
    assert reason({"messages": [{"role": "user", "content": None}, ANSWER]}) == "empty_prompt"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a": [1, "ü"]}', {"a": [1, "ü"]}), ({"a": [1, "ü"]}, {"a": [1, "ü"]}), ("", {}), (None, {})],
)
def test_arguments_as_string_and_as_object_are_the_same(arguments: Any, expected: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    found = messages(USER, {"role": "assistant", "content": None, "tool_calls": [call]})[1]
    assert found["tool_calls"] == [
        {"type": "function", "function": {"name": "f", "arguments": expected}, "id": "1"},
    ]


@pytest.mark.parametrize("role", ["Critic", "assistant2", "", None, 5, "narrator"])
@pytest.mark.parametrize("shape_of", ["messages", "conversations"])
def test_an_unknown_role_never_becomes_an_assistant(role: Any, shape_of: str) -> None:
    said = {"role": role, "content": "x"} if shape_of == "messages" else {"from": role, "value": "x"}
    assert reason({shape_of: [USER, said, ANSWER]}) == "unknown_role"


def test_list_content() -> None:
    parts = [{"type": "text", "text": "x"}, "y", {"type": "text", "text": "z"}]
    # vLLM joins them by a line break for templates that take a text, and hands them over one by one to others.
    found = messages({"role": "user", "content": parts})
    assert found == [{"role": "user", "content": "x\ny\nz", "parts": ["x", "y", "z"]}]
    assert messages(*found) == found
    # Others have something else by that name.
    assert messages({"role": "user", "content": "x", "parts": [{"text": "x"}]}) == [USER | {"content": "x"}]
    thought = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}]
    assert messages(USER, {"role": "assistant", "content": thought})[1] == ANSWER | {"reasoning_content": "hm"}


def test_tool_calls_and_replies() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    found = messages(
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "1", "name": "f"},
        ANSWER,
    )
    shaped = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}, "id": "1"}
    assert found[1] == {"role": "assistant", "content": "", "tool_calls": [shaped]}
    assert found[2] == {"role": "tool", "content": "3", "tool_call_id": "1", "name": "f"}
    bare = {"name": "f", "arguments": {"a": 1}}
    assert messages(USER, {"role": "assistant", "tool_calls": [bare]})[1]["tool_calls"][0]["function"] == bare
    assert (
        reason({"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]})
        == "bad_tools"
    )
    broken = {"name": "f", "arguments": "{"}
    assert reason({"messages": [USER, {"role": "assistant", "tool_calls": [broken]}]}) == "bad_tools"


def test_tools() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert shape({"messages": [USER], "tools": [tool]}).tools == [tool]
    assert shape({"messages": [USER], "tools": json.dumps([tool])}).tools == [tool]
    assert shape({"messages": [USER], "tools": []}).tools is None
    assert reason({"messages": [USER], "tools": {"f": 1}}) == "bad_tools"


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning(key: str) -> None:
    assert messages(USER, ANSWER | {key: "hm"})[1] == ANSWER | {"reasoning_content": "hm"}
    assert messages(USER, ANSWER | {key: None})[1] == ANSWER


def test_sharegpt() -> None:
    row = {
        "system": "be brief",
        "conversations": [
            {"from": "human", "value": "u"},
            {"from": "gpt", "value": "a"},
            {"role": "user", "content": "v"},
        ],
    }
    assert shape(row).messages == [
        {"role": "system", "content": "be brief"},
        USER,
        ANSWER,
        {"role": "user", "content": "v"},
    ]
    call = [
        {"from": "human", "value": "u"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
        {"from": "observation", "value": "3"},
    ]
    found = shape({"conversations": call}).messages
    assert found[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
    }
    assert found[2] == {"role": "tool", "content": "3"}


def test_sharegpt_calls_of_one_turn_are_all_taken() -> None:
    calls = [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": "{}"}]
    said = [{"from": "human", "value": "u"}, {"from": "function_call", "value": json.dumps(calls)}]
    assert shape({"conversations": said}).messages[1]["tool_calls"] == [
        {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
        {"type": "function", "function": {"name": "g", "arguments": {}}},
    ]
    said[1]["value"] = "[]"
    assert reason({"conversations": said}) == "bad_tools"


def test_messages_as_a_text() -> None:
    """As columns of text in Parquet have them."""
    assert shape({"messages": json.dumps([USER, ANSWER])}).messages == [USER, ANSWER]
    assert shape({"conversations": '[{"from": "human", "value": "u"}]', "system": "s"}).messages == [
        {"role": "system", "content": "s"}, USER,
    ]  # fmt: skip
    for text in ("Human: hello", "[" * 100_000):
        with pytest.raises(Unusable, match="no_messages: messages are a text that is not valid JSON"):
            shape({"messages": text})
    assert reason({"messages": '{"role": "user", "content": "u"}'}) == "no_messages"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize(
    "row",
    [
        '{"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": %s}}]}]}',
        '{"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{\\"a\\": [%s]}"}]}]}',
        '{"messages": [{"role": "user", "content": "u"}], "tools": [{"name": "f", "default": %s}]}',
    ],
    ids=["arguments", "arguments as text", "tools"],
)
def test_numbers_that_json_does_not_have(row: str, number: str) -> None:
    with pytest.raises(Unusable) as caught:
        shape(json.loads(row % number))
    assert (caught.value.reason, caught.value.detail) == ("bad_tools", "a number that JSON does not have")
    assert shape(json.loads(row % "1.5")).messages[0] == USER


def test_such_numbers_are_harmless_where_nothing_uses_them() -> None:
    nan = float("nan")
    found = shape({"messages": [USER | {"score": nan}, ANSWER], "score": nan, "generated": {"score": nan}})
    assert found.messages == [USER, ANSWER]
    assert found.generated is None


def test_arguments_that_cannot_be_written_as_json() -> None:
    """Parquet has times and bytes."""
    call = {"name": "f", "arguments": {"at": datetime(2020, 1, 1)}}
    with pytest.raises(Unusable, match="bad_tools: a value that JSON does not have"):
        shape({"messages": [USER, {"role": "assistant", "tool_calls": [call]}]})
    text = {"name": "f", "arguments": "[" * 100_000}
    assert reason({"messages": [USER, {"role": "assistant", "tool_calls": [text]}]}) == "bad_tools"


def test_prompts_alone() -> None:
    assert shape({"prompt": "u"}).messages == [USER]
    assert shape({"prompt": [USER], "completion": [ANSWER]}).messages == [USER, ANSWER]
    assert shape({"prompt": "u", "response": "a"}).messages == [USER, ANSWER]


def test_system_messages() -> None:
    assert messages({"role": "system", "content": ""}, USER) == [USER]
    assert messages({"role": "developer", "content": "d"}, USER)[0] == {"role": "developer", "content": "d"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "x"}, "no_messages"),
        ({"messages": []}, "no_messages"),
        ({"messages": None}, "no_messages"),
        ("text", "no_messages"),
        ({"messages": ["u"]}, "bad_message"),
        ({"messages": [{"role": "user", "content": 5}]}, "bad_message"),
        ({"messages": [USER, {"role": "critic", "content": "x"}]}, "unknown_role"),
        ({"messages": [{"content": "x"}]}, "unknown_role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "non_text_content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "non_text_content"),
        ({"messages": [{"role": "user", "content": " "}, ANSWER]}, "empty_prompt"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "bad_unicode"),
        ({"messages": [USER], "tools": [{"name": "\ud800"}]}, "bad_unicode"),
        ({"messages": [USER], "id": "\ud800"}, "bad_unicode"),
        ({"messages": [USER], "split": "holdout"}, "unknown_split"),
    ],
)
def test_reasons(row: Any, expected: str) -> None:
    assert reason(row) == expected


@pytest.mark.parametrize(("given", "split"), [("train", "train"), ("Validation", "validation"), ("test", "evaluation")])
def test_split(given: str, split: str) -> None:
    assert shape({"messages": [USER], "split": given}).split == split


def test_a_written_row_is_read_back_as_it_was() -> None:
    given = Conversation(
        "i", "s", "d", [USER, ANSWER | {"truncated": True}], [{"name": "f"}], "train", {"finish_reasons": ["stop"]}
    )
    assert shape(json.loads(json.dumps(given.as_row()))) == given
    often = Conversation("i", "s", "d", [USER, ANSWER], repeats=3)
    assert shape(json.loads(json.dumps(often.as_row()))) == often
    # What the target wrote is not that any more once somebody has edited it; by any means but that of its ids.
    row = json.loads(json.dumps(given.as_row()))
    row["messages"][1]["content"] = "b"
    assert shape(row) == replace(
        given, messages=[USER, {"role": "assistant", "content": "b", "truncated": True}], generated=None
    )
    assert shape(row | {"messages": [*given.messages, USER]}).generated is None
    # Rows of an earlier version do not say what they are of, and are taken at their word.
    del row["generated"]["content_key"]
    assert shape(row).generated == given.generated
    # A column of that name in somebody's data is not taken for it.
    assert shape({"messages": [USER, ANSWER], "repeats": 7}).repeats == 1


def test_keys() -> None:
    one = shape({"messages": [USER, ANSWER], "id": 1, "domain": "x"})
    same = shape({"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]})
    assert one.content_key() == same.content_key()
    answered_otherwise = shape({"messages": [USER, ANSWER | {"content": "b"}]})
    assert one.content_key() != answered_otherwise.content_key()
    assert one.prompt_key() == answered_otherwise.prompt_key() == shape({"prompt": "u"}).prompt_key()
    assert one.prompt_key() != shape({"prompt": "v"}).prompt_key()
