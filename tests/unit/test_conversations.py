"""conversations: every shape in one shape, and a reason for what is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.config import Source
from draftsmith.conversations import Conversation, DropCount, Dropped, Unusable, normalise, read_conversations
from draftsmith.errors import DraftsmithError
from draftsmith.sources import RawRow

USER = {"role": "user", "content": "u"}
ANSWER = {"role": "assistant", "content": "a"}


def shape(row: Any) -> Conversation:
    return normalise(RawRow("f.jsonl", "line 7", row), "f.jsonl", "general")


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


def test_list_content() -> None:
    parts = [{"type": "text", "text": "x"}, "y", {"type": "text", "text": "z"}]
    assert messages({"role": "user", "content": parts})[0]["content"] == "xyz"
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


def test_prompts_alone() -> None:
    assert shape({"prompt": "u"}).messages == [USER]
    assert shape({"prompt": [USER], "completion": [ANSWER]}).messages == [USER, ANSWER]
    assert shape({"prompt": "u", "response": "a"}).messages == [USER, ANSWER]


def test_system_messages() -> None:
    assert messages({"role": "system", "content": ""}, USER) == [USER]
    assert messages({"role": "developer", "content": "d"}, USER)[0]["role"] == "system"


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


def test_keys() -> None:
    one = shape({"messages": [USER, ANSWER], "id": 1, "domain": "x"})
    same = shape({"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]})
    assert one.content_key() == same.content_key()
    answered_otherwise = shape({"messages": [USER, ANSWER | {"content": "b"}]})
    assert one.content_key() != answered_otherwise.content_key()
    assert one.prompt_key() == answered_otherwise.prompt_key() == shape({"prompt": "u"}).prompt_key()
    assert one.prompt_key() != shape({"prompt": "v"}).prompt_key()


def write(path: Path, rows: list[Any]) -> Source:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Source(path=str(path))


def test_reading_goes_on_behind_a_row_that_is_left_out(tmp_path: Path) -> None:
    first = write(tmp_path / "chat.jsonl", [{"prompt": "a"}, {"messages": [{"role": "x"}]}, {"prompt": "b"}])
    second = write(tmp_path / "code.jsonl", [{"prompt": "c"}]).model_copy(update={"domain": "python"})
    found = list(read_conversations([first, second]))
    assert [given.domain if isinstance(given, Conversation) else given for given in found] == [
        "chat", Dropped(f"{tmp_path}/chat.jsonl, line 2", "unknown_role", "'x'"), "chat", "python",
    ]  # fmt: skip


def test_a_file_without_conversations_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        DraftsmithError, match=r"a\.jsonl: holds no conversations; its rows need messages .* the first has foo, bar"
    ):
        list(read_conversations([write(tmp_path / "a.jsonl", [{"foo": 1, "bar": 2}])]))
    with pytest.raises(DraftsmithError, match=r"a\.jsonl: holds no conversations; data\.sources\[0\]"):
        list(read_conversations([write(tmp_path / "a.jsonl", [])]))
    # In a folder, too, each file must have some.
    write(tmp_path / "a.jsonl", [{"prompt": "a"}])
    write(tmp_path / "b.jsonl", [{"foo": 1}])
    with pytest.raises(DraftsmithError, match=r"b\.jsonl: holds no conversations"):
        list(read_conversations([Source(path=str(tmp_path))]))


def test_too_many_dropped() -> None:
    dropped = DropCount()
    dropped.check(0, 0.0)
    for place in range(3):
        dropped.add(f"f, line {place}", "unknown_role", "'x'")
    dropped.add("f, line 9", "duplicate")
    dropped.check(10, 0.3, ("duplicate",))
    with pytest.raises(
        DraftsmithError,
        match=r"4 of 10 conversations .*max_dropped_fraction \(0\.3\).*unknown_role 3 \(first: f, line 0: 'x'\); duplicate 1",
    ):
        dropped.check(10, 0.3)
