"""A conversation that the target carries on itself: what it is asked turn by turn, and what it answers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from draftsmith.chat import Chat
from draftsmith.conversations import Conversation, Message

_REASONING = re.compile(r"^\s*(?:<think>)?(.*?)</think>\s*(.*)$", re.DOTALL)
_OPENED = re.compile(r"<think>\s*$")
# gpt-oss names a channel before each part of its answer.
_ANALYSIS = re.compile(r"<\|channel\|>analysis<\|message\|>(.*?)(?:<\|end\|>|$)", re.DOTALL)
_FINAL = re.compile(r"<\|channel\|>final<\|message\|>(.*)$", re.DOTALL)


@dataclass(slots=True)
class Talk:
    """One conversation on its way through the engine.

    ``questions`` are the source's messages without its answers, cut where the target has its turn; ``ended`` is a reason
    code if the talk stopped before the last question was answered.
    """

    conversation: Conversation
    key: str
    questions: list[list[Message]]
    answers: list[dict[str, Any]] = field(default_factory=list)
    ended: str | None = None
    detail: str = ""

    @property
    def finished(self) -> bool:
        """Whether nothing is left to ask."""
        return self.ended is not None or len(self.answers) == len(self.questions)

    def messages(self, asking: bool = False) -> list[Message]:
        """The conversation so far; with ``asking`` also the next question, as the prompt has it."""
        messages: list[Message] = []
        for question, answer in zip(self.questions, self.answers, strict=False):
            messages += [*question, _message(answer)]
        if asking:
            messages += self.questions[len(self.answers)]
        return messages

    def seed(self, seed: int) -> int:
        """Seed of the next answer: the same in every run, another for each conversation and turn."""
        digest = hashlib.sha256(f"{seed}/{self.key}/{len(self.answers)}".encode()).digest()
        return int.from_bytes(digest[:4], "big")

    def record(self) -> dict[str, Any]:
        """What the journal keeps."""
        return {"key": self.key, "answers": self.answers, "ended": self.ended, "detail": self.detail}


def start(conversation: Conversation) -> Talk:
    """A talk with nothing answered yet."""
    return Talk(conversation, conversation.prompt_key(), questions(conversation.messages))


def questions(messages: Sequence[Message]) -> list[list[Message]]:
    """The messages without answers, cut behind each place where the target has its turn.

    That is after every user message, and after tool replies where the source had an answer; what follows the last such
    place is left out.
    """
    cut: list[list[Message]] = []
    current: list[Message] = []
    for message in messages:
        asked = any(earlier["role"] in ("user", "tool") for earlier in current)
        if asked and message["role"] in ("assistant", "user"):
            cut.append(current)
            current = []
        if message["role"] != "assistant":
            current.append(message)
    if any(message["role"] in ("user", "tool") for message in current):
        cut.append(current)
    return cut


def answer(
    chat: Chat, prompt_tail: str, ids: Sequence[int], finish_reason: str, ends: frozenset[int]
) -> dict[str, Any]:
    """An answer from its token ids: content, reasoning if there is any, the ids themselves and why it ended.

    ``prompt_tail`` is the end of the prompt's text, which may have opened a reasoning block.
    """
    text = chat.decode(ids[:-1] if ids and ids[-1] in ends else ids)
    content, reasoning = split_reasoning(text, opened=bool(_OPENED.search(prompt_tail)))
    found: dict[str, Any] = {"content": content, "token_ids": list(ids), "finish_reason": finish_reason}
    return found | ({"reasoning_content": reasoning} if reasoning else {})


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


def completed(conversation: Conversation, talk: Talk, fingerprint: str) -> Conversation:
    """The conversation with the target's answers; ``generated`` notes their token ids and whose they are."""
    return Conversation(
        conversation_id=conversation.conversation_id,
        source=conversation.source,
        domain=conversation.domain,
        messages=talk.messages(),
        tools=conversation.tools,
        split=conversation.split,
        generated={
            "fingerprint": fingerprint,
            "finish_reasons": [given["finish_reason"] for given in talk.answers],
            "token_ids": [given["token_ids"] for given in talk.answers],
        },
    )


def _message(given: dict[str, Any]) -> Message:
    message: Message = {"role": "assistant", "content": given["content"]}
    if "reasoning_content" in given:
        message["reasoning_content"] = given["reasoning_content"]
    if given["finish_reason"] == "length":
        message["truncated"] = True
    return message
