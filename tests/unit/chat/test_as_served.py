"""as_served: messages and tools as vLLM hands them to a template, keys and all; test_vllm_chat.py compares with vLLM itself."""

from __future__ import annotations

import json
from typing import Any

import pytest

from draftsmith.chat.as_served import Shape, loops_over_content, sendable, sendable_tools, tools
from kinds import KINDS

CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}, "id": "7"}


def shown(message: dict[str, Any], **shape: bool) -> str:
    """The JSON of a message as a template would write it, with the order of its keys."""
    [found] = Shape(**shape).messages([message])
    return json.dumps(found)


def test_keys_and_their_order() -> None:
    answer = {"role": "assistant", "content": "", "reasoning_content": "t", "tool_calls": [CALL], "truncated": True}
    assert shown(answer) == (
        '{"role": "assistant", "content": "", "tool_calls": [{"id": "7", "function": {"arguments": {"a": 1}, "name": "f"}, '
        '"type": "function"}], "reasoning": "t", "reasoning_content": "t"}'
    )
    reply = {"role": "tool", "name": "f", "tool_call_id": "7", "content": "3"}
    assert shown(reply) == '{"role": "tool", "content": "3", "tool_call_id": "7", "name": "f"}'
    # Only a tool's reply has the id of a call.
    assert shown({"role": "user", "content": "q", "tool_call_id": "7"}) == '{"role": "user", "content": "q"}'


def test_arguments_as_text() -> None:
    [found] = Shape().messages([{"role": "assistant", "content": "", "tool_calls": [CALL]}], arguments_as_text=True)
    assert found["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


def test_reasoning_by_a_third_name_only_for_gpt_oss() -> None:
    answer = {"role": "assistant", "content": "a", "reasoning_content": "t"}
    assert "thinking" not in Shape.of("{{ messages[0].thinking }}").messages([answer])[0]
    assert Shape.of(KINDS["harmony"].template).messages([answer])[0]["thinking"] == "t"


def test_parts() -> None:
    assert (
        shown({"role": "user", "content": "q"}, parts=True)
        == '{"role": "user", "content": [{"type": "text", "text": "q"}]}'
    )
    two = {"role": "user", "content": "q\nr", "parts": ["q", "r"]}
    assert [part["text"] for part in Shape(parts=True).messages([two])[0]["content"]] == ["q", "r"]
    assert shown(two) == '{"role": "user", "content": "q\\nr"}'
    # A reply is a text in any case, and where there is but a call there is no part.
    assert shown({"role": "tool", "content": "3"}, parts=True) == '{"role": "tool", "content": "3"}'
    assert Shape(parts=True).messages([{"role": "assistant", "content": "", "tool_calls": [CALL]}])[0]["content"] == []


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for part in m['content'] | list %}{{ part.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% set content = m.content %}{% for part in content[1:] %}{{ part }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% generation %}{% for part in m.content %}x{% endfor %}{% endgeneration %}{% endfor %}", True),
        ("{% for m in messages %}{% for part in m.content.parts %}x{% endfor %}{% break %}{% endfor %}", False),
        ("{% for part in messages[0].content %}x{% endfor %}", False),
        ("{% for m in messages %}", False),
    ],
)  # fmt: skip
def test_templates_that_loop_over_a_content(template: str, expected: bool) -> None:
    assert loops_over_content(template) is expected
    assert [name for name, kind in KINDS.items() if loops_over_content(kind.template)] == ["gemma"]


def roles(*given: str, **shape: bool) -> list[tuple[str, Any]]:
    messages = [{"role": role, "content": f"{role} {place}"} for place, role in enumerate(given)]
    return [(message["role"], message["content"]) for message in Shape(**shape).messages(messages)]


def test_developers() -> None:
    assert roles("developer", "user") == [("system", "developer 0"), ("user", "user 1")]
    # Elsewhere, or beside another one, it goes to the start.
    assert roles("system", "user", "developer") == [("system", "system 0\n\ndeveloper 2"), ("user", "user 1")]
    assert roles("user", "developer") == [("system", "developer 1"), ("user", "user 0")]
    # Without a developer, system messages stay where they are, and a template that knows developers is given them.
    assert roles("user", "system") == [("user", "user 0"), ("system", "system 1")]
    assert roles("user", "developer", developer=True) == [("user", "user 0"), ("developer", "developer 1")]
    assert Shape.of("{% if m.role == 'developer' %}").developer


def test_tools() -> None:
    parameters = {"type": "object"}
    bare = {"name": "f", "parameters": parameters, "zeta": 1}
    expected = (
        '[{"type": "function", "function": {"name": "f", "description": null, "parameters": {"type": "object"}}}]'
    )
    assert json.dumps(tools([bare])) == expected
    assert json.dumps(tools([{"function": bare, "type": "function"}])) == expected
    strict = json.dumps(tools([{"type": "function", "function": bare | {"description": "d", "strict": False}}]))
    assert '"description": "d", "parameters": {"type": "object"}, "strict": false' in strict
    assert tools([{"type": "browser"}]) == [{"type": "browser"}]
    assert tools(None) is None


def test_what_a_client_sends() -> None:
    calling = {"role": "assistant", "content": "", "reasoning_content": "t", "truncated": True}
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}, CALL]
    assert sendable([calling | {"tool_calls": calls}, {"role": "user", "content": "q\nr", "parts": ["q", "r"], "name": "bob"}]) == [
        {
            # Without an id a request is not taken.
            "role": "assistant", "content": None, "reasoning": "t", "reasoning_content": "t",
            "tool_calls": [
                {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}},
                {"id": "7", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
            ],
        },
        {"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "text", "text": "r"}], "name": "bob"},
    ]  # fmt: skip
    assert sendable_tools([{"name": "f"}]) == {"tools": [{"type": "function", "function": {"name": "f"}}]}
    assert sendable_tools([]) == {}
