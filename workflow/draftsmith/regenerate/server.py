"""One OpenAI-compatible server of the target: how a question is sent to it, and what its answer holds."""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

from draftsmith.chat.as_served import sendable, sendable_tools
from draftsmith.config import Regenerate
from draftsmith.conversations import Message
from draftsmith.regenerate import shapes
from draftsmith.regenerate.asking import FINISHED, Question, Reply
from draftsmith.regenerate.shapes import MalformedReply, Unfinished

Way = Literal["completions", "chat"]

# Seconds; a server that is there accepts at once.
_CONNECT_SECONDS = 10.0


class Server:
    """A server and how it is asked, which :func:`draftsmith.regenerate.checks.examine` finds out.

    ``way`` is 'completions' (the prompt's token ids are sent, the answer's come back) or 'chat' (messages both ways);
    ``extended`` tells that the server takes vLLM's arguments beyond OpenAI's; ``vocabulary`` is the target's, in tokens. ``busy`` counts requests in flight, ``up``
    is False while it does not answer.
    """

    def __init__(
        self,
        address: str,
        settings: Regenerate,
        key: str | None,
        template_args: dict[str, Any],
        stops: Sequence[int],
        vocabulary: int,
    ) -> None:
        self.vocabulary = vocabulary
        self.address, self._settings, self._args, self._stops = address, settings, template_args, list(stops)
        self.client = _client(address, settings, key)
        self._options = _without_key() if key is None else {}
        self.model = ""
        self.way: Way = "completions"
        self.extended = True
        self.up = True
        self.busy = 0

    async def ask(self, question: Question) -> Reply:
        """Send a question and wait for its answer; the client tries again by itself, with pauses that grow.

        Raises openai's exceptions, :class:`MalformedReply` and :class:`Unfinished`.
        """
        given = await self.post(self.way, question)
        choice = shapes.first_choice(given)
        reason = choice.get("finish_reason")
        if reason not in FINISHED:
            raise Unfinished(f"the server ended the request with {reason!r}")
        ids = shapes.token_ids(choice, self.vocabulary)
        tokens = shapes.length(given) if ids is None else len(ids)
        if self.way == "completions":
            if ids is None:
                raise MalformedReply("the answer has no token_ids, which the server gave before")
            return Reply(question.name, reason, ids, tokens=tokens)
        return Reply(question.name, reason, ids, shapes.message(choice), tokens)

    async def post(self, way: Way, question: Question) -> dict[str, Any]:
        """Send a question one way; returns the JSON object that came back."""
        body = self._body(way, question)
        path = "/completions" if way == "completions" else "/chat/completions"
        given = await _json(path, self.client.post(path, cast_to=object, body=body, options=self._options))
        if not isinstance(given, dict):
            raise MalformedReply(f"{path} gave no JSON object but {str(given)[:200]!r}")
        return given

    async def models(self, tries: int) -> list[dict[str, Any]]:
        """What the server says that it has."""
        client = self.client.with_options(max_retries=tries - 1)
        given = await _json("/models", client.get("/models", cast_to=object, options=self._options))
        listed = given.get("data") if isinstance(given, dict) else None
        if not isinstance(listed, list) or not all(isinstance(one, dict) and "id" in one for one in listed):
            raise MalformedReply(f"/models gave no list of models but {str(given)[:200]!r}")
        return listed

    async def tokenize(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> list[int] | None:
        """Token ids that vLLM makes of a prompt; None where the server has no such address."""
        from openai import APIStatusError

        body = {
            "model": self.model, "messages": sendable(messages), "add_generation_prompt": True,
            "chat_template_kwargs": self._args, **sendable_tools(tools),
        }  # fmt: skip
        try:
            place = self.address.removesuffix("/v1") + "/tokenize"
            given = await _json(place, self.client.post(place, cast_to=object, body=body, options=self._options))
        except MalformedReply:
            return None
        except APIStatusError as error:
            if error.status_code >= 500:
                raise
            return None
        ids = given.get("tokens") if isinstance(given, dict) else None
        return ids if isinstance(ids, list) and all(isinstance(token, int) for token in ids) else None

    def _body(self, way: Way, question: Question) -> dict[str, Any]:
        settings = self._settings
        body: dict[str, Any] = {
            "model": self.model, "max_tokens": question.max_tokens, "temperature": settings.temperature,
            "top_p": settings.top_p, **({} if question.seed is None else {"seed": question.seed}),
        }  # fmt: skip
        # All of them, as vLLM takes what is not named from the checkpoint's generation_config.json.
        more: dict[str, Any] = {
            "top_k": settings.top_k or -1, "min_p": settings.min_p, "repetition_penalty": settings.repetition_penalty,
        }  # fmt: skip
        if self.extended:
            body |= more | {"stop_token_ids": self._stops, "return_token_ids": True}
        else:
            neutral = Regenerate()
            body |= {name: value for name, value in more.items() if getattr(settings, name) != getattr(neutral, name)}
        if way == "completions":
            return body | {"prompt": question.prompt}
        body |= {"messages": sendable(question.messages), **sendable_tools(question.tools)}
        return body | ({"chat_template_kwargs": self._args} if self._args else {})


async def _json(path: str, request: Awaitable[Any]) -> Any:
    """What a request gives; the client itself lets a broken body that is called JSON through as the parser's error."""
    try:
        return await request
    except UnicodeEncodeError:
        # Of the question, not of the answer.
        raise
    except (ValueError, RecursionError) as error:
        raise MalformedReply(f"{path} gave broken JSON ({error})") from error


def _client(address: str, settings: Regenerate, key: str | None) -> Any:
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient, Omit, Timeout

    # What the environment says of an account with OpenAI is no business of this server.
    headers: dict[str, Any] = {"OpenAI-Organization": Omit(), "OpenAI-Project": Omit()}
    return AsyncOpenAI(
        base_url=address,
        # Left out of the requests where there is none; without it the client would look for OpenAI's own.
        api_key=key or "none",
        max_retries=settings.max_tries - 1,
        timeout=Timeout(settings.request_timeout, connect=_CONNECT_SECONDS),
        default_headers=headers,
        # No proxy stands between this machine and itself.
        http_client=DefaultAsyncHttpxClient(trust_env=not _is_here(address)),
    )


def _without_key() -> dict[str, Any]:
    from openai import Omit

    return {"headers": {"Authorization": Omit()}}


def _is_here(address: str) -> bool:
    host = urlsplit(address).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
