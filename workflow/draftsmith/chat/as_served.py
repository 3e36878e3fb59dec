"""Messages and tools in the shape in which vLLM's chat endpoint hands them to a template.

Templates write whole objects into the prompt (``{{ tools | tojson }}``), so that an absent key, another order of keys or a
text in place of a list of parts makes another prompt. The shape is that of vLLM 0.26 to 0.33 (``renderers/hf.py``,
``chat_utils.py`` and ``ChatCompletionRequest``), of which 0.26 alone also keeps keys of a function that OpenAI does not
know; :mod:`draftsmith.preflight.served` compares with the installed release.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

_GENERATION = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
_DEVELOPER = ("'developer'", '"developer"')
_HARMONY = "<|channel|>"


@dataclass(frozen=True, slots=True)
class Shape:
    """What a template takes, read off its source.

    ``parts``: a content is a list of parts, since the template loops over it, and else a text. ``developer``: the template
    knows this role; else such a message becomes a system message. ``thinking``: reasoning goes by this name too.
    """

    parts: bool = False
    developer: bool = False
    thinking: bool = False

    @classmethod
    def of(cls, template: str) -> Shape:
        """The shape for a template's source."""
        return cls(
            parts=loops_over_content(template),
            developer=any(name in template for name in _DEVELOPER),
            # vLLM knows two names. gpt-oss's prompts it does not build by the template, which reads a third, but by
            # openai-harmony, which is given the reasoning.
            thinking=_HARMONY in template,
        )

    def messages(self, messages: Sequence[Message], *, arguments_as_text: bool = False) -> list[Message]:
        """The messages as the template gets them, keys in vLLM's order; ``truncated`` and other notes stay out."""
        shown = [self._message(message, arguments_as_text) for message in messages]
        if not self.developer and any(message["role"] == "developer" for message in shown):
            return _system_first(shown)
        return shown

    def _message(self, message: Message, arguments_as_text: bool) -> Message:
        role, content = message["role"], message["content"]
        shown: Message = {"role": role, "content": content}
        if self.parts and role != "tool":
            # Clients send null where there is nothing but a call.
            nothing = not content and message.get("tool_calls")
            texts = [] if nothing else message.get("parts") or [content]
            shown["content"] = [{"type": "text", "text": text} for text in texts]
        if role == "assistant":
            if calls := message.get("tool_calls"):
                shown["tool_calls"] = [_call(call, arguments_as_text) for call in calls]
            if reasoning := message.get("reasoning_content"):
                shown |= {"reasoning": reasoning, "reasoning_content": reasoning}
                if self.thinking:
                    shown["thinking"] = reasoning
        elif role == "tool" and "tool_call_id" in message:
            shown["tool_call_id"] = message["tool_call_id"]
        if "name" in message:
            shown["name"] = message["name"]
        if role == "developer" and self.developer:
            shown["tools"] = None
        return shown


def tools(given: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The tools as vLLM's request model writes them out: bare functions wrapped, keys that it does not know left out."""
    return None if given is None else [_tool(tool) for tool in given]


def sendable(messages: Sequence[Message]) -> list[Message]:
    """The messages as a client of OpenAI's API sends them, from which vLLM makes those of :class:`Shape`."""
    return [_sendable(message) for message in messages]


def sendable_tools(given: Sequence[dict[str, Any]] | None) -> dict[str, Any]:
    """The key ``tools`` of a request, or none."""
    if not given:
        return {}
    return {"tools": [tool if "function" in tool else {"type": "function", "function": tool} for tool in given]}


def _sendable(message: Message) -> Message:
    sent: Message = {key: message[key] for key in ("role", "content", "name", "tool_call_id") if key in message}
    if parts := message.get("parts"):
        sent["content"] = [{"type": "text", "text": part} for part in parts]
    if reasoning := message.get("reasoning_content"):
        # The newer name is vLLM's, which takes the older one for it; other servers know that one alone.
        sent |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if calls := message.get("tool_calls"):
        sent["content"] = sent["content"] or None
        sent["tool_calls"] = [_sendable_call(call, number) for number, call in enumerate(calls)]
    return sent


def _sendable_call(call: dict[str, Any], number: int) -> dict[str, Any]:
    function = call["function"]
    return {
        # A request without ids is not taken; where the template writes them, the rows have to have them.
        "id": call.get("id") or f"call_{number}",
        "type": "function",
        "function": {"name": function["name"], "arguments": json.dumps(function["arguments"], ensure_ascii=False)},
    }


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function", tool)
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        return tool
    shown = {"name": function.get("name"), "description": function.get("description")}
    shown["parameters"] = function.get("parameters")
    if function.get("strict") is not None:
        shown["strict"] = function["strict"]
    return {"type": "function", "function": shown}


def _call(call: dict[str, Any], arguments_as_text: bool) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    if arguments_as_text:
        arguments = json.dumps(arguments, ensure_ascii=False)
    shown: dict[str, Any] = {"id": call["id"]} if "id" in call else {}
    return shown | {"function": {"arguments": arguments, "name": call["function"]["name"]}, "type": "function"}


def _system_first(messages: list[Message]) -> list[Message]:
    """Developer messages as system messages, all of them joined at the start unless there is but one that stands there."""
    messages = [message | {"role": "system"} if message["role"] == "developer" else message for message in messages]
    places = [place for place, message in enumerate(messages) if message["role"] == "system"]
    if places == [0]:
        return messages
    texts = [_text(messages[place]["content"]) for place in places]
    joined = "\n\n".join(text for text in texts if text)
    return [{"role": "system", "content": joined}, *(message for message in messages if message["role"] != "system")]


def _text(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def loops_over_content(template: str) -> bool:
    """Whether a template loops over a message's content, by which vLLM tells that it takes a list of parts."""
    import jinja2
    from jinja2 import nodes

    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        tree = environment.parse(_GENERATION.sub("", template))
    except jinja2.TemplateSyntaxError:
        return False
    for loop in tree.find_all(nodes.For):
        over: nodes.Node = loop.iter
        while isinstance(over, nodes.Filter | nodes.Test | nodes.Getitem) and over.node is not None:
            if isinstance(over, nodes.Getitem) and not isinstance(over.arg, nodes.Slice):
                break
            over = over.node
        if isinstance(over, nodes.Name) and over.name == "content":
            return True
        if isinstance(over, nodes.Getattr | nodes.Getitem) and isinstance(over.node, nodes.Name):
            key = over.attr if isinstance(over, nodes.Getattr) else over.arg
            if (key.value if isinstance(key, nodes.Const) else key) == "content":
                return True
    return False
