"""What is asked and what comes back, whether vLLM runs in this process or a server is asked."""

from __future__ import annotations

import time
import traceback
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from draftsmith.conversations import Message

FINISHED = ("stop", "length", "tool_calls")
"""Reasons to end that leave an answer; any other is a failure."""


class Question(NamedTuple):
    """One request: a prompt both as messages and as the token ids that the template makes of them.

    ``tail`` is the end of the prompt's text, ``max_tokens`` the longest answer, ``seed`` None where nothing is sampled.
    """

    name: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    prompt: list[int]
    tail: str
    max_tokens: int
    seed: int | None


class Failure(NamedTuple):
    """An error with its whole traceback, and when it happened (seconds since the epoch)."""

    error: str
    traceback: str
    time: float

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """The failure that an exception means."""
        text = " ".join(str(error).split()) or "no message"
        return cls(f"{type(error).__name__}: {text}", "".join(traceback.format_exception(error)), time.time())


class Reply(NamedTuple):
    """A finished request.

    ``finish_reason`` is the server's word ('stop', 'length', 'tool_calls', …). ``token_ids`` hold the end-of-turn token
    and are None where the server does not tell them. ``message`` is the answer as a chat server took it apart: content,
    reasoning_content, tool_calls. ``tokens`` is the answer's length. With a ``failure`` there is no answer.
    """

    name: str
    finish_reason: str = ""
    token_ids: list[int] | None = None
    message: Message | None = None
    tokens: int = 0
    failure: Failure | None = None


class Answerer(Protocol):
    """Answers questions while more of them come; loaded or connected within a ``with`` block."""

    at_once: int
    """How many questions it should be given at a time."""

    def __enter__(self) -> Answerer: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def ask(self, question: Question) -> None:
        """Queue a question; ValueError when it is refused at once."""
        ...

    def wait(self) -> list[Reply]:
        """What has been answered since the last call, none after a second or so without any."""
        ...

    def described(self) -> dict[str, Any]:
        """What the report tells of it."""
        ...
