"""Conversations of any shape in one shape: OpenAI messages, with a reason code for each row that cannot be used.

Taken are OpenAI's ``messages`` (null or list content, tool calls, tool replies, reasoning), ShareGPT's
``conversations`` (``from``/``value``) and prompts alone (``prompt``, a text or messages); rows that are tokens already
are :mod:`draftsmith.conversations.tokenised`'s. A role that is not known drops its conversation: turned into an assistant, as some do,
it would be learnt as if the target had said it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from draftsmith.conversations import tokenised
from draftsmith.conversations.dropped import DropCount as DropCount
from draftsmith.conversations.dropped import Dropped as Dropped
from draftsmith.conversations.dropped import Unusable as Unusable
from draftsmith.conversations.sources import RawRow
from draftsmith.conversations.tokenised import Tokenised

Message = dict[str, Any]

_MESSAGE_KEYS = ("messages", "conversations", "conversation")
_ID_KEYS = ("id", "conversation_id", "uuid", "prompt_id")
_OF = "content_key"
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
KNOWN_KEYS = "messages (role and content), conversations (from and value), prompt, or input_ids and loss_mask"
"""What a row may have, for error messages."""
_ROLES = {
    "system": "system", "developer": "developer",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "model": "assistant",
    "function_call": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "tool_response": "tool", "function_response": "tool",
}  # fmt: skip
_SPLITS = {
    "train": "train", "training": "train", "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
    "evaluation": "evaluation", "eval": "evaluation", "test": "evaluation",
}  # fmt: skip

_INSTRUCTING = ("system", "developer")

REASONS = {
    "malformed_line": "a line of the file is no JSON, or no UTF-8",
    "no_messages": f"the row has no {KNOWN_KEYS}",
    "bad_message": "a message is no object with a role and a content",
    "unknown_role": "a role is none of system, user, assistant, tool and their usual other names",
    "non_text_content": "a content part is no text, such as an image",
    "bad_tools": "tools or tool_calls are not of OpenAI's shape, or hold what JSON does not have",
    "bad_unicode": "a text holds half of a surrogate pair, which has no UTF-8 form",
    "empty_prompt": "a user message is empty",
    "unknown_split": "`split` is none of train, validation and evaluation",
}
"""Reason codes of :func:`normalise` with what each means."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation in OpenAI's shape.

    Message keys are role, content (always a string), and where the source had them reasoning_content, tool_calls
    (arguments parsed), tool_call_id, name, truncated, and parts: the texts of a content of several. ``generated`` is what
    the stage regenerate noted. ``repeats`` tells how often a pass of training takes it, ``source_index`` its place in
    ``data.sources``; ``where`` is the file and line that it was read from, for messages.
    """

    conversation_id: str
    source: str
    domain: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    split: str | None = None
    generated: dict[str, Any] | None = None
    repeats: int = 1
    source_index: int = field(default=0, compare=False)
    where: str = field(default="", compare=False)
    # Asked for again and again. Not handed on to a copy with other messages.
    _keys: dict[str, str] = field(default_factory=dict, init=False, compare=False, repr=False)

    def content_key(self) -> str:
        """Identity of the whole conversation: the first 32 hex digits of SHA-256 over its messages and tools."""
        if "content" not in self._keys:
            self._keys["content"] = _digest([self.messages, self.tools])
        return self._keys["content"]

    def prompt_key(self) -> str:
        """Identity of everything but the answers.

        Conversations that share it stay on one side of a split, and on the same one when the answers are regenerated.
        """
        if "prompt" not in self._keys:
            asked = [message for message in self.messages if message["role"] != "assistant"]
            self._keys["prompt"] = _digest([asked, self.tools])
        return self._keys["prompt"]

    def as_row(self) -> dict[str, Any]:
        """The conversation as a JSONL row that :func:`normalise` reads back to an equal one."""
        row: dict[str, Any] = {
            "id": self.conversation_id,
            "source": self.source,
            "domain": self.domain,
            "messages": self.messages,
        }
        noted = (self.generated or {}) | ({"repeats": self.repeats} if self.repeats > 1 else {})
        if self.generated:
            # What the target is said to have written; an answer that somebody edits later is not that any more.
            noted[_OF] = self.content_key()
        optional = {"tools": self.tools, "split": self.split, "generated": noted or None}
        return row | {key: value for key, value in optional.items() if value is not None}


def normalise(raw: RawRow, source: str, domain: str) -> Conversation | Tokenised:
    """Bring one row into shape.

    Raises :class:`Unusable` with one of :data:`REASONS` or of conversations/tokenised.py's.
    """
    if raw.fault:
        raise Unusable("malformed_line", raw.fault)
    row = raw.value if isinstance(raw.value, Mapping) else {"messages": raw.value}
    given = tokenised.parse(row) if tokenised.holds_tokens(row) else None
    messages = [] if given else [shaped for one in _given_messages(row) if (shaped := _message(one)) is not None]
    if not given and not messages:
        raise Unusable("no_messages")
    split = row.get("split")
    if split is not None and str(split).lower() not in _SPLITS:
        raise Unusable("unknown_split", repr(split))
    name = next(
        (str(row[key]) for key in _ID_KEYS if row.get(key) not in (None, "")),
        raw.named(source),
    )
    source, domain = str(row.get("source") or source), str(row.get("domain") or domain)
    _check_writable(name, source, domain)
    split = None if split is None else _SPLITS[str(split).lower()]
    if given:
        return Tokenised(name, source, domain, *given, split, where=raw.where)
    tools, generated = _tools(row.get("tools")), row.get("generated")
    noted = dict(generated) if isinstance(generated, dict) and _is_writable(generated) else {}
    repeats, of = noted.pop("repeats", 1), noted.pop(_OF, None)
    _check_writable(messages, tools)
    often = max(_whole(repeats), 1)
    found = Conversation(name, source, domain, messages, tools, split, noted or None, often, where=raw.where)
    return found if of in (None, found.content_key()) else replace(found, generated=None)


def _whole(given: Any) -> int:
    return given if isinstance(given, int) else 1


def _check_writable(*texts: Any) -> None:
    try:
        json.dumps(texts, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise Unusable("bad_unicode") from None
    except ValueError:
        # Python's parser takes NaN and Infinity, and makes one of 1e999; only arguments and tools can hold a number.
        raise Unusable("bad_tools", "a number that JSON does not have") from None
    except TypeError:
        raise Unusable("bad_tools", "a value that JSON does not have") from None
    except RecursionError:
        raise Unusable("bad_tools", "nested too deeply") from None


def _is_writable(value: Any) -> bool:
    try:
        _check_writable(value)
    except Unusable:
        return False
    return True


def _given_messages(row: Mapping[str, Any]) -> list[Any]:
    given = next((row[key] for key in _MESSAGE_KEYS if row.get(key)), None)
    if given is None:
        prompt = row.get("prompt")
        given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        answer = row.get("completion") or row.get("response")
        if isinstance(given, list):
            if isinstance(answer, str) and answer:
                answer = [{"role": "assistant", "content": answer}]
            if answer and not isinstance(answer, list):
                raise Unusable("no_messages", f"the answer is {type(answer).__name__}, neither text nor messages")
            given = given + (answer or [])
    elif isinstance(given, str):
        # As columns of text have them.
        given = _parsed(given, "no_messages", "messages are a text that is not valid JSON")
    if not isinstance(given, list) or not given:
        raise Unusable("no_messages")
    system = row.get("system")
    if isinstance(system, str) and system and not (isinstance(given[0], Mapping) and _role(given[0]) in _INSTRUCTING):
        given = [{"role": "system", "content": system}, *given]
    return given


def _role(message: Mapping[str, Any]) -> str | None:
    named = message.get("role") or message.get("from")
    return _ROLES.get(named.lower()) if isinstance(named, str) else None


def _message(given: Any) -> Message | None:
    """One message in shape; None for an empty system message, which says nothing."""
    if not isinstance(given, Mapping):
        raise Unusable("bad_message", f"a {type(given).__name__}")
    named = given.get("role") or given.get("from")
    role = _role(given)
    if role is None:
        raise Unusable("unknown_role", repr(named))
    texts, reasoning = _content(given["content"] if given.get("content") is not None else given.get("value"))
    # As vLLM joins them for templates that take a text; others are given the parts.
    content = joined(texts)
    message: Message = {"role": role, "content": content}
    parts = texts if len(texts) > 1 else given.get("parts")
    if isinstance(parts, list) and all(isinstance(part, str) for part in parts) and joined(parts) == content:
        message["parts"] = parts
    if role == "assistant":
        reasoning = next(
            (given[key] for key in _REASONING_KEYS if isinstance(given.get(key), str) and given[key]), reasoning
        )
        if reasoning:
            message["reasoning_content"] = reasoning
        calls = given.get("tool_calls") or ([given["function_call"]] if given.get("function_call") else [])
        if named == "function_call":
            called = _parsed(content)
            message["content"], calls = "", called if isinstance(called, list) and called else [called]
        if calls:
            message["tool_calls"] = _tool_calls(calls)
        if given.get("truncated"):
            message["truncated"] = True
    elif role in _INSTRUCTING and not content:
        return None
    elif role == "user" and not content.strip():
        raise Unusable("empty_prompt")
    message |= {key: str(given[key]) for key in ("name", "tool_call_id") if given.get(key)}
    return message


def joined(texts: Sequence[str]) -> str:
    """Texts of a content in one, as vLLM joins them."""
    return "\n".join(text for text in texts if text)


def _content(given: Any) -> tuple[list[str], str]:
    """Texts and reasoning of a content: null, a string, or a list of parts."""
    if given is None:
        return [], ""
    if isinstance(given, str):
        return [given], ""
    if not isinstance(given, list):
        raise Unusable("bad_message", f"content is a {type(given).__name__}")
    texts: list[str] = []
    thoughts: list[str] = []
    for part in given:
        found = text_of(part)
        if found is None:
            kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
            raise Unusable("non_text_content", str(kind))
        (thoughts if found.thought else texts).append(found.text)
    return texts, "".join(thoughts)


class PartText(NamedTuple):
    """The text of a part of a content; ``thought`` where it is reasoning."""

    text: str
    thought: bool


def text_of(part: Any) -> PartText | None:
    """What one part of a list content says: a string, or an object of a type of texts or of thoughts; None for all else."""
    if isinstance(part, str):
        return PartText(part, thought=False)
    if not isinstance(part, Mapping):
        return None
    kind = part.get("type", "text")
    thought = kind in ("thinking", "reasoning")
    if not thought and kind not in ("text", "input_text", "output_text"):
        return None
    text = part.get(kind, part.get("text")) if thought else part.get("text")
    return PartText(text, thought) if isinstance(text, str) else None


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    """Tool calls in OpenAI's shape with arguments as an object, which is how vLLM hands them to the template."""
    shaped = []
    listed = _parsed(calls) if isinstance(calls, str) else calls
    if not isinstance(listed, list | tuple):
        raise Unusable("bad_tools", f"tool_calls is {type(listed).__name__}, not a list")
    for call in listed:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise Unusable("bad_tools", "a tool call without a name")
        arguments = function.get("arguments")
        arguments = _parsed(arguments or "{}") if isinstance(arguments, str) or arguments is None else arguments
        shaped.append(
            {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
            | ({"id": str(call["id"])} if call.get("id") else {})
        )
    return shaped


def _tools(given: Any) -> list[dict[str, Any]] | None:
    given = _parsed(given) if isinstance(given, str) and given.strip() else given
    if not given:
        return None
    tools = [_parsed(tool) if isinstance(tool, str) else tool for tool in given] if isinstance(given, list) else []
    objects = [tool for tool in tools if isinstance(tool, dict)]
    if not objects or len(objects) != len(tools):
        raise Unusable("bad_tools", "tools are no list of objects")
    return objects


def _parsed(text: str, reason: str = "bad_tools", detail: str = "arguments or tools that are not valid JSON") -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise Unusable(reason, detail) from None


def _digest(value: Any) -> str:
    return hashlib.sha256(
        json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()
    ).hexdigest()[:32]
