"""What vLLM's chat endpoint makes of messages: the prompt's text and token ids, without an engine and without weights.

The request is parsed and rendered by the classes that serve ``/v1/chat/completions``, the same in 0.26 to 0.33, so that
whatever they do to messages, tools and template arguments is done here too. tests/unit/test_vllm_chat.py names the interfaces.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.chat.as_served import sendable, sendable_tools
from draftsmith.conversations import Message

_ANY_LENGTH = 1 << 30


class Refused(Exception):
    """vLLM would answer such a request with an error; its text says why."""


@dataclass(frozen=True)
class ServedPrompt:
    """A prompt as the engine would be given it: token ids, and the text where vLLM rendered one (else None)."""

    text: str | None
    ids: list[int]


class ServedChat:
    """vLLM's chat rendering for one target; ``configured`` is what its engine arguments were made into (a VllmConfig)."""

    def __init__(self, configured: Any) -> None:
        from vllm.renderers.online_renderer import OnlineRenderer
        from vllm.renderers.registry import renderer_from_config

        model_config = copy.copy(configured.model_config)
        # Extraction is given no more than its longest row; here a longer prompt shall be seen, not refused.
        model_config.max_model_len = _ANY_LENGTH
        self._renderer = OnlineRenderer(
            model_config=model_config,
            renderer=renderer_from_config(configured),
            request_logger=None,
            # The template that comes with the tokenizer, as for a server that is not told of another.
            chat_template=None,
            chat_template_content_format="auto",
        )

    @property
    def by_harmony(self) -> bool:
        """Whether prompts are built by openai-harmony and not by a template, as for gpt-oss."""
        return bool(self._renderer.use_harmony)

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, arguments: Mapping[str, Any]
    ) -> ServedPrompt:
        """The prompt of a request for the answer to ``messages``; ``arguments`` are those of the template.

        Raises :class:`Refused` where a server would refuse the request.
        """
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        try:
            request = ChatCompletionRequest.model_validate(request_body(messages, tools, arguments))
            rendered = asyncio.run(self._renderer.render_chat(request))
        except Exception as error:
            # Validation, templates and tokenizers each raise their own kinds; a server turns them all into an answer.
            raise Refused(_reason(error)) from error
        if not isinstance(rendered, tuple):
            raise Refused(str(getattr(getattr(rendered, "error", rendered), "message", rendered)))
        prompt: Any = rendered[1][0]
        return ServedPrompt(prompt.get("prompt"), list(prompt["prompt_token_ids"]))


def request_body(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """The JSON body that a client of the chat endpoint sends for ``messages``."""
    body: dict[str, Any] = {"model": "target", "messages": sendable(messages), **sendable_tools(tools)}
    if tools:
        # Else a server wants to know how it shall read calls out of answers.
        body["tool_choice"] = "none"
    return body | {"chat_template_kwargs": dict(arguments)}


def _reason(error: Exception) -> str:
    faults = getattr(error, "errors", None)
    if callable(faults) and (listed := faults()):
        where = ".".join(str(part) for part in listed[0]["loc"])
        return f"{where}: {listed[0]['msg']}"
    return " ".join(str(error).split())[:300] or type(error).__name__
