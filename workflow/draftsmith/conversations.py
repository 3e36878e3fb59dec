"""Conversations of any shape in one shape: OpenAI messages, with a reason code for each row that cannot be used.

Taken are OpenAI's ``messages`` (null or list content, tool calls, tool replies, reasoning), ShareGPT's
``conversations`` (``from``/``value``) and prompts alone (``prompt``, a text or messages). A role that is not known drops
its conversation: turned into an assistant, as some do, it would be learnt as if the target had said it.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftsmith.config import Source
from draftsmith.errors import DraftsmithError
from draftsmith.log import log
from draftsmith.sources import RawRow, default_domain, read_source

Message = dict[str, Any]

_MESSAGE_KEYS = ("messages", "conversations", "conversation")
_ID_KEYS = ("id", "conversation_id", "uuid", "prompt_id")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_KNOWN_KEYS = "messages (role and content), conversations (from and value) or prompt"
_ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "model": "assistant",
    "function_call": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "tool_response": "tool", "function_response": "tool",
}  # fmt: skip
_SPLITS = {
    "train": "train", "training": "train", "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
    "evaluation": "evaluation", "eval": "evaluation", "test": "evaluation",
}  # fmt: skip

REASONS = {
    "no_messages": f"the row has no {_KNOWN_KEYS}",
    "bad_message": "a message is no object with a role and a content",
    "unknown_role": "a role is none of system, user, assistant, tool and their usual other names",
    "non_text_content": "a content part is no text, such as an image",
    "bad_tools": "tools or tool_calls are not of OpenAI's shape",
    "bad_unicode": "a text holds half of a surrogate pair, which has no UTF-8 form",
    "empty_prompt": "a user message is empty",
    "unknown_split": "`split` is none of train, validation and evaluation",
}
"""Reason codes of :func:`normalise` with what each means."""


class Unusable(Exception):
    """A conversation that is left out: ``reason`` is a code, ``detail`` what was found."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation in OpenAI's shape.

    Message keys are role, content (always a string), and where the source had them reasoning_content, tool_calls
    (arguments parsed), tool_call_id, name, truncated. ``generated`` is what the stage regenerate noted.
    """

    conversation_id: str
    source: str
    domain: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    split: str | None = None
    generated: dict[str, Any] | None = None

    def content_key(self) -> str:
        """Identity of the whole conversation: the first 32 hex digits of SHA-256 over its messages and tools."""
        return _digest([self.messages, self.tools])

    def prompt_key(self) -> str:
        """Identity of everything but the answers.

        Conversations that share it stay on one side of a split, and on the same one when the answers are regenerated.
        """
        return _digest([[message for message in self.messages if message["role"] != "assistant"], self.tools])

    def as_row(self) -> dict[str, Any]:
        """The conversation as a JSONL row that :func:`normalise` reads back to an equal one."""
        row: dict[str, Any] = {
            "id": self.conversation_id,
            "source": self.source,
            "domain": self.domain,
            "messages": self.messages,
        }
        optional = {"tools": self.tools, "split": self.split, "generated": self.generated}
        return row | {key: value for key, value in optional.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Dropped:
    """A row that is no usable conversation, with where it lies."""

    where: str
    reason: str
    detail: str


@dataclass
class DropCount:
    """How many conversations were left out for which reason, each with its first example."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, where: str, reason: str, detail: str = "") -> None:
        """Count one conversation."""
        self.counts[reason] += 1
        self.examples.setdefault(reason, f"{where}: {detail}" if detail else where)

    def check(self, total: int, allowed: float, harmless: Sequence[str] = ()) -> None:
        """Raise :class:`DraftsmithError` when more than the share ``allowed`` of ``total`` cannot be used.

        Reasons in ``harmless`` do not count, since nothing is wrong with those conversations.
        """
        unusable = sum(count for reason, count in self.counts.items() if reason not in harmless)
        if total and unusable > allowed * total:
            listed = "; ".join(
                f"{reason} {count} (first: {self.examples[reason]})"
                for reason, count in self.counts.most_common()
                if reason not in harmless
            )
            raise DraftsmithError(
                f"{unusable} of {total} conversations cannot be used, more than data.max_dropped_fraction ({allowed:g}) "
                f"allows: {listed}; mend the data or raise the limit"
            )

    def report(self, stage: str) -> None:
        """Log one line a reason."""
        for reason, count in self.counts.most_common():
            log(f"{stage}: left out {count} conversations: {reason} (first: {self.examples[reason]})")


def read_conversations(sources: Sequence[Source]) -> Iterator[Conversation | Dropped]:
    """All conversations of the sources in order.

    Raises :class:`DraftsmithError` at the end of a file in which no row has any messages.
    """
    for index, source in enumerate(sources):
        rows = read_source(source, index)
        domain = source.domain or default_domain(source)
        file, seen, empty, first = None, 0, 0, None
        any_row = False
        for raw in rows:
            any_row = True
            if raw.file != file:
                _check_not_empty(file, seen, empty, first)
                file, seen, empty, first = raw.file, 0, 0, raw
            seen += 1
            try:
                yield normalise(raw, source.path, domain)
            except Unusable as unusable:
                empty += unusable.reason == "no_messages"
                yield Dropped(f"{raw.file}, {raw.place}", unusable.reason, unusable.detail)
        _check_not_empty(file, seen, empty, first)
        if not any_row:
            raise DraftsmithError(
                f"{source.path}: holds no conversations; data.sources[{index}] needs rows with {_KNOWN_KEYS}"
            )


def _check_not_empty(file: str | None, seen: int, empty: int, first: RawRow | None) -> None:
    if file is not None and first is not None and seen == empty:
        found = (
            ", ".join(map(str, first.value)) if isinstance(first.value, Mapping) else f"a {type(first.value).__name__}"
        )
        raise DraftsmithError(
            f"{file}: holds no conversations; its rows need {_KNOWN_KEYS}, and the first has {found or 'no keys'}"
        )


def normalise(raw: RawRow, source: str, domain: str) -> Conversation:
    """Bring one row into shape.

    Raises :class:`Unusable` with one of :data:`REASONS`.
    """
    row = raw.value if isinstance(raw.value, Mapping) else {"messages": raw.value}
    messages = [message for given in _given_messages(row) if (message := _message(given)) is not None]
    if not messages:
        raise Unusable("no_messages")
    split = row.get("split")
    if split is not None and str(split).lower() not in _SPLITS:
        raise Unusable("unknown_split", repr(split))
    name = next(
        (str(row[key]) for key in _ID_KEYS if row.get(key) not in (None, "")),
        f"{source}:{raw.place.rsplit(' ', 1)[-1]}",
    )
    generated = row.get("generated")
    conversation = Conversation(
        conversation_id=name,
        source=str(row.get("source") or source),
        domain=str(row.get("domain") or domain),
        messages=messages,
        tools=_tools(row.get("tools")),
        split=None if split is None else _SPLITS[str(split).lower()],
        generated=generated if isinstance(generated, dict) else None,
    )
    try:
        json.dumps(messages, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Unusable("bad_unicode") from None
    return conversation


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
    if not isinstance(given, list) or not given:
        raise Unusable("no_messages")
    system = row.get("system")
    if isinstance(system, str) and system and not (isinstance(given[0], Mapping) and _role(given[0]) == "system"):
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
    content, reasoning = _content(given["content"] if given.get("content") is not None else given.get("value"))
    message: Message = {"role": role, "content": content}
    if role == "assistant":
        reasoning = next(
            (given[key] for key in _REASONING_KEYS if isinstance(given.get(key), str) and given[key]), reasoning
        )
        if reasoning:
            message["reasoning_content"] = reasoning
        calls = given.get("tool_calls") or ([given["function_call"]] if given.get("function_call") else [])
        if named == "function_call":
            message["content"], calls = "", [_parsed(content)]
        if calls:
            message["tool_calls"] = _tool_calls(calls)
        if given.get("truncated"):
            message["truncated"] = True
    elif role == "system" and not content:
        return None
    elif role == "user" and not content.strip():
        raise Unusable("empty_prompt")
    message |= {key: str(given[key]) for key in ("name", "tool_call_id") if given.get(key)}
    return message


def _content(given: Any) -> tuple[str, str]:
    """Text and reasoning of a content: null, a string, or a list of parts."""
    if given is None:
        return "", ""
    if isinstance(given, str):
        return given, ""
    if not isinstance(given, list):
        raise Unusable("bad_message", f"content is a {type(given).__name__}")
    texts: list[str] = []
    thoughts: list[str] = []
    for part in given:
        if isinstance(part, str):
            part = {"text": part}
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind in ("thinking", "reasoning") and isinstance(part.get(kind, part.get("text")), str):
            thoughts.append(part.get(kind, part.get("text")))
        else:
            raise Unusable("non_text_content", str(kind))
    return "".join(texts), "".join(thoughts)


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


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise Unusable("bad_tools", "arguments or tools that are not valid JSON") from None


def _digest(value: Any) -> str:
    return hashlib.sha256(
        json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()
    ).hexdigest()[:32]
