"""A finished request as an answer: content, reasoning, tool calls, token ids, and why it ended."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from draftsmith.chat import Chat
from draftsmith.conversations import Message, Unusable

_REASONING = re.compile(r"^\s*(?:<think>)?(.*?)</think>\s*(.*)$", re.DOTALL)
_OPENED = re.compile(r"<think>\s*$")
# gpt-oss names a channel before each part of its answer.
_ANALYSIS = re.compile(r"<\|channel\|>analysis<\|message\|>(.*?)(?:<\|end\|>|$)", re.DOTALL)
_FINAL = re.compile(r"<\|channel\|>final<\|message\|>(.*)$", re.DOTALL)

Answer = dict[str, Any]
"""content and finish_reason; token_ids or else tokens (their number); reasoning_content and tool_calls where there are any."""


def from_ids(chat: Chat, prompt_tail: str, ids: Sequence[int], finish_reason: str, ends: frozenset[int]) -> Answer:
    """An answer from its token ids.

    ``prompt_tail`` is the end of the prompt's text, which may have opened a reasoning block. A tool call stays in the
    content, in the words of the target: so it is learnt, and so the template shows it to the target again.
    """
    text = chat.decode(ids[:-1] if ids and ids[-1] in ends else ids)
    content, reasoning = split_reasoning(text, opened=bool(_OPENED.search(prompt_tail)))
    found: Answer = {"content": content, "token_ids": list(ids), "finish_reason": finish_reason}
    return found | ({"reasoning_content": reasoning} if reasoning else {})


def from_message(
    prompt_tail: str, message: Message, ids: Sequence[int] | None, finish_reason: str, tokens: int
) -> Answer:
    """An answer from a chat server's message, which may have reasoning and tool calls apart; ``tokens`` is its length.

    Raises :class:`Unusable`: 'bad_tools' when the arguments of a tool call are no JSON, 'bad_unicode' for a text that
    has no UTF-8 form.
    """
    content, reasoning = message.get("content") or "", message.get("reasoning_content") or ""
    if not reasoning and ("</think>" in content or content.lstrip().startswith("<think>") or finish_reason == "length"):
        # A server that does not take reasoning out.
        content, reasoning = split_reasoning(content, opened=bool(_OPENED.search(prompt_tail)))
    found: Answer = {"content": content, "finish_reason": finish_reason}
    found |= {"tokens": tokens} if ids is None else {"token_ids": list(ids)}
    if reasoning:
        found["reasoning_content"] = reasoning.strip("\n")
    if message.get("tool_calls"):
        found["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Unusable("bad_unicode", "the answer holds half of a surrogate pair") from None
    return found


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        given = function.get("arguments") or "{}"
        # Some servers have them parsed already.
        arguments = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        raise Unusable("bad_tools", f"the target called {function['name']} with arguments that are no JSON") from None
    made = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return made | ({"id": str(call["id"])} if call.get("id") else {})


def split_reasoning(text: str, *, opened: bool) -> tuple[str, str]:
    """Content and reasoning of a generated text; ``opened`` tells that the prompt had opened the reasoning."""
    if "<|channel|>" in text:
        final = _FINAL.search(text)
        return (final.group(1) if final else ""), "".join(_ANALYSIS.findall(text))
    opened = opened or text.lstrip().startswith("<think>")
    if found := _REASONING.match(text) if opened else None:
        return found.group(2), found.group(1).strip("\n")
    # Cut off while it was still thinking.
    return ("", text.removeprefix("<think>").strip("\n")) if opened else (text, "")


def is_empty(answer: Answer) -> bool:
    """Whether the target said nothing: no content, no call; reasoning alone is no answer either."""
    return not answer["content"].strip() and not answer.get("tool_calls")


def message(answer: Answer) -> Message:
    """The answer as the conversation has it."""
    shown: Message = {"role": "assistant", "content": answer["content"]}
    shown |= {key: answer[key] for key in ("reasoning_content", "tool_calls") if key in answer}
    if answer["finish_reason"] == "length":
        shown["truncated"] = True
    return shown
