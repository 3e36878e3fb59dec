"""A conversation that the target carries on itself: what it is asked turn by turn, and what it answers.

Tool replies are the source's. They fit only where the target called the same functions as the source, so a talk ends
behind an answer that called others.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from draftsmith.conversations import Conversation, Message
from draftsmith.regenerate import answers
from draftsmith.regenerate.answers import Answer


class Part(NamedTuple):
    """What is said between two answers; ``called`` names for each tool reply in it the function (None: not known)."""

    messages: list[Message]
    called: list[str | None]


@dataclass(slots=True)
class Talk:
    """One conversation on its way through the engine.

    ``parts`` are the source's messages without its answers, cut where the target has its turn; ``ended`` is a reason code
    if the talk stopped before the last of them was answered.
    """

    conversation: Conversation
    key: str
    parts: list[Part]
    answers: list[Answer] = field(default_factory=list)
    ended: str | None = None
    detail: str = ""

    @property
    def finished(self) -> bool:
        """Whether nothing is left to ask."""
        return self.ended is not None or len(self.answers) == len(self.parts)

    def messages(self, asking: bool = False) -> list[Message]:
        """The conversation so far; with ``asking`` also the next question, as the prompt has it."""
        messages: list[Message] = []
        before: Answer = {}
        for place, part in enumerate(self.parts[: len(self.answers) + asking]):
            messages += _reply_to(part, before.get("tool_calls", []))
            if place < len(self.answers):
                before = self.answers[place]
                messages.append(answers.message(before))
        return messages

    def take(self, answer: Answer) -> None:
        """Add an answer, and end the talk where the next part does not follow from it."""
        self.answers.append(answer)
        if self.finished:
            return
        if answers.is_empty(answer):
            # Reasoning that was cut before the answer is worth learning, but nothing follows from it.
            self.ended = "truncated"
        elif not _fits(self.parts[len(self.answers)], answer):
            self.ended = "calls_differ"
            self.detail = f"turn {len(self.answers)}"

    def seed(self, seed: int) -> int:
        """Seed of the next answer: the same in every run, another for each conversation and turn."""
        digest = hashlib.sha256(f"{seed}/{self.key}/{len(self.answers)}".encode()).digest()
        return int.from_bytes(digest[:4], "big")

    def record(self) -> dict[str, Any]:
        """What the journal keeps."""
        return {"key": self.key, "answers": self.answers, "ended": self.ended, "detail": self.detail}


def start(conversation: Conversation) -> Talk:
    """A talk with nothing answered yet."""
    return Talk(conversation, conversation.prompt_key(), parts(conversation.messages))


def restored(conversation: Conversation, record: dict[str, Any]) -> Talk:
    """The talk that ``record`` was made of."""
    talk = start(conversation)
    talk.answers, talk.ended, talk.detail = record["answers"], record["ended"], record["detail"]
    return talk


def parts(messages: Sequence[Message]) -> list[Part]:
    """The messages without answers, cut behind each place where the target has its turn.

    That is after every user message, and after tool replies where the source had an answer; what follows the last such
    place is left out.
    """
    cut: list[Part] = []
    current = Part([], [])
    calls: list[dict[str, Any]] = []
    for message in messages:
        role = message["role"]
        asked = any(earlier["role"] in ("user", "tool") for earlier in current.messages)
        if asked and role in ("assistant", "user"):
            cut.append(current)
            current = Part([], [])
        if role == "assistant":
            calls = list(message.get("tool_calls", []))
            continue
        current.messages.append(message)
        if role == "tool":
            current.called.append(_function(message, calls))
    if any(message["role"] in ("user", "tool") for message in current.messages):
        cut.append(current)
    return cut


def completed(talk: Talk, fingerprint: str) -> Conversation:
    """The conversation with the target's answers; ``generated`` notes whose they are and, where known, their token ids."""
    noted = [given.get("token_ids") for given in talk.answers]
    return replace(
        talk.conversation,
        messages=talk.messages(),
        generated={
            "fingerprint": fingerprint,
            "finish_reasons": [given["finish_reason"] for given in talk.answers],
            **({"token_ids": noted} if any(ids is not None for ids in noted) else {}),
        },
    )


def _function(reply: Message, calls: list[dict[str, Any]]) -> str | None:
    """The function that a tool reply answers: by the call's id, or else the next call in order."""
    named = reply.get("tool_call_id")
    place = next((place for place, call in enumerate(calls) if named and call.get("id") == named), 0)
    if calls:
        return str(calls.pop(place)["function"]["name"])
    return reply.get("name")


def _fits(part: Part, answer: Answer) -> bool:
    """Whether what the source goes on with follows from ``answer``."""
    known = [name for name in part.called if name is not None]
    if calls := answer.get("tool_calls"):
        made = Counter(call["function"]["name"] for call in calls)
        return len(calls) == len(part.called) and not Counter(known) - made
    # A call in the target's own words: how it is written differs from model to model, but it names the function.
    return all(name in answer["content"] for name in known)


def _reply_to(part: Part, calls: Sequence[dict[str, Any]]) -> list[Message]:
    """The part with the ids of the target's own calls in its tool replies."""
    waiting = [call for call in calls if call.get("id")]
    shown, names = [], iter(part.called)
    for message in part.messages:
        if message["role"] == "tool":
            name = next(names)
            call = next((call for call in waiting if name in (None, call["function"]["name"])), None)
            if call is not None:
                waiting.remove(call)
                message = message | {"tool_call_id": call["id"]}
        shown.append(message)
    return shown
