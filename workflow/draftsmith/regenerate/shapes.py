"""A server's answer looked over before anything is made of it: what is of OpenAI's shape comes out, all else is told."""

from __future__ import annotations

import json
from typing import Any

from draftsmith.conversations import Message, joined, text_of


class MalformedReply(Exception):
    """The server's answer is none of OpenAI's shape."""


class Unfinished(Exception):
    """The server ended a request for another reason than the answer's end."""


def first_choice(given: dict[str, Any]) -> dict[str, Any]:
    """The one choice of an answer; raises :class:`MalformedReply` without one."""
    choices = given.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise MalformedReply(f"the answer has no choices: {_start(given)}")
    return choices[0]


def token_ids(choice: dict[str, Any], vocabulary: int) -> list[int] | None:
    """The answer's token ids, None where the server does not tell them.

    Raises :class:`MalformedReply` unless each is a whole number from 0 to below ``vocabulary``, the target's.
    """
    ids = choice.get("token_ids")
    if ids is None:
        return None
    if not isinstance(ids, list):
        raise MalformedReply(f"token_ids are no list but {_start(ids)}")
    for place, token in enumerate(ids):
        # A bool is an int to Python.
        if type(token) is not int or not 0 <= token < vocabulary:
            raise MalformedReply(
                f"token_ids[{place}] is {_start(token)}, no id of the target's vocabulary of {vocabulary}"
            )
    return ids


def length(given: dict[str, Any]) -> int:
    """The answer's length in tokens as its usage tells it, 0 where it does not."""
    usage = given.get("usage")
    told = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return told if type(told) is int and told > 0 else 0


def message(choice: dict[str, Any]) -> Message:
    """A chat answer's message: content and reasoning_content as texts, tool_calls as they came or None.

    vLLM calls the reasoning reasoning, others reasoning_content. A content of several parts is joined as that of a source's
    message is, with a line break between its texts. Raises :class:`MalformedReply`.
    """
    given = choice.get("message")
    if not isinstance(given, dict):
        raise MalformedReply(f"the answer has no message: {_start(choice)}")
    content, thoughts = _content(given.get("content"))
    reasoning = given.get("reasoning_content") or given.get("reasoning") or thoughts
    if not isinstance(reasoning, str):
        raise MalformedReply(f"the answer's reasoning is no text but {_start(reasoning)}")
    calls = given.get("tool_calls") or None
    if calls is not None and not (isinstance(calls, list) and all(_is_call(call) for call in calls)):
        raise MalformedReply(f"tool_calls are no list of function calls but {_start(calls)}")
    return {"content": content, "reasoning_content": reasoning, "tool_calls": calls}


def _content(given: Any) -> tuple[str, str]:
    """Text and reasoning of a content: null, a text, or a list of parts."""
    if given is None or isinstance(given, str):
        return given or "", ""
    if not isinstance(given, list):
        raise MalformedReply(f"content is neither a text nor a list of parts but {_start(given)}")
    texts: list[str] = []
    thoughts: list[str] = []
    for part in given:
        found = text_of(part)
        if found is None:
            raise MalformedReply(f"a part of content is no text: {_start(part)}")
        (thoughts if found.thought else texts).append(found.text)
    return joined(texts), "".join(thoughts)


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments"), str | dict | None)
    )


def _start(given: Any) -> str:
    return json.dumps(given)[:200]
