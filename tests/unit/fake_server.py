"""A server of OpenAI's API that answers as it is told to, on 127.0.0.1 and a free port, for the tests of regenerate."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

Body = dict[str, Any]


class FakeServer:
    """Stands for a server of the target.

    ``reply`` gives the answer to a prompt's text: a text (one that ends in '…' is cut there), or a chat message as an
    object. ``fault`` gives for the n-th generation an HTTP status to fail with, 'hang', 'drop' (close the connection),
    something to await first, or None. ``spoil`` gives for a prompt's text and the answer's object, of a probe too, what is
    answered in its place, a text as it is; ``how['models']`` does so for the list of models. ``requests`` are all (path, body, headers); ``asked`` the prompts' texts of all generations but probes.
    """

    def __init__(self, tokenizer: Any, **how: Any) -> None:
        self.tokenizer = tokenizer
        self.how = {
            "model": "target", "root": None, "max_model_len": None, "key": None, "token_ids": True, "tokenize": True,
            "extended": True, "parent": None, "models": None,
        } | how  # fmt: skip
        self.reply: Callable[[str], str | Body] = lambda prompt: "fine"
        self.fault: Callable[[int, str], Any] = lambda count, prompt: None
        self.spoil: Callable[[str, Body], Any] = lambda prompt, answer: answer
        self.requests: list[tuple[str, Body, dict[str, str]]] = []
        self.asked: list[str] = []
        self.generations = self.most_at_once = self._now = 0
        self.dead = False

    def __enter__(self) -> FakeServer:
        app = FastAPI()
        app.get("/v1/models")(self._models)
        app.post("/v1/completions")(self._completions)
        app.post("/v1/chat/completions")(self._chat)
        if self.how["tokenize"]:
            app.post("/tokenize")(self._tokenize)
        self._server = uvicorn.Server(
            uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", timeout_graceful_shutdown=0)
        )
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            self._thread.join(0.01)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server and every connection."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()

    def die(self) -> str:
        """From within ``fault``: break every connection from now on, as a killed server does."""
        self.dead = True
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        return "hang"

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def _models(self, request: Request) -> Response:
        if refused := await self._note(request, {}):
            return refused
        if self.how["models"] is not None:
            return _as_json(self.how["models"])
        card = {"id": self.how["model"], "object": "model", "owned_by": "somebody"}
        card |= {name: self.how[name] for name in ("root", "parent", "max_model_len") if self.how[name]}
        return JSONResponse({"object": "list", "data": [card] if self.how["model"] else []})

    async def _tokenize(self, request: Request) -> JSONResponse:
        body = await request.json()
        if refused := await self._note(request, body):
            return refused
        return JSONResponse({"tokens": self._ids(self._render(body)), "count": 0})

    async def _completions(self, request: Request) -> Response:
        body = await request.json()
        if refused := await self._note(request, body):
            return refused
        if not self.how["token_ids"]:
            return _error(404, "no such address here")
        text = self.tokenizer.decode(body["prompt"])
        failed = await self._generate(request, body, text)
        if failed is not None:
            return failed
        said, ids, finish = self._said(text, body)
        assert isinstance(said, str)
        choice = {"text": said, "token_ids": ids, "prompt_token_ids": body["prompt"], "finish_reason": finish}
        return _as_json(self.spoil(text, {"choices": [choice]}))

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        if refused := await self._note(request, body):
            return refused
        if not self.how["extended"] and {"top_k", "return_token_ids", "stop_token_ids"} & set(body):
            return _error(400, "unknown argument top_k")
        text = self._render(body)
        failed = await self._generate(request, body, text)
        if failed is not None:
            return failed
        said, ids, finish = self._said(text, body)
        message = {"role": "assistant", **(said if isinstance(said, dict) else {"content": said})}
        if message.get("tool_calls"):
            finish = "tool_calls"
        choice = {"message": message, "finish_reason": finish}
        return _as_json(self.spoil(text, {"choices": [choice], "usage": {"completion_tokens": len(ids)}}))

    async def _note(self, request: Request, body: Body) -> JSONResponse | None:
        if self.dead:
            self._drop(request)
            await asyncio.sleep(3600)
        self.requests.append((request.url.path, body, dict(request.headers)))
        if self.how["key"] and request.headers.get("authorization") != f"Bearer {self.how['key']}":
            return _error(401, f"wrong key: {request.headers.get('authorization')}")
        return None

    async def _generate(self, request: Request, body: Body, text: str) -> JSONResponse | None:
        if body["max_tokens"] == 1:
            return None
        self.generations += 1
        count = self.generations
        self.asked.append(text)
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        try:
            await asyncio.sleep(0.002)
            fault = self.fault(count, text)
            if inspect.isawaitable(fault):
                fault = await fault
            if fault == "hang":
                await asyncio.sleep(3600)
            if fault == "drop":
                self._drop(request)
                await asyncio.sleep(3600)
            return None if fault is None else _error(int(fault), f"because of {fault}")
        finally:
            self._now -= 1

    def _drop(self, request: Request) -> None:
        port = request.client.port if request.client else None
        for connection in list(self._server.server_state.connections):
            if connection.transport.get_extra_info("peername")[1] == port:
                connection.transport.abort()

    def _said(self, text: str, body: Body) -> tuple[str | Body, list[int], str]:
        reply = self.reply(text)
        shown = reply if isinstance(reply, str) else json.dumps(reply)
        ids = self._ids(shown.removesuffix("…"))
        cut = shown.endswith("…") or len(ids) > body["max_tokens"]
        end = self.tokenizer.eos_token_id
        return (
            reply.removesuffix("…") if isinstance(reply, str) else reply,
            ids[: body["max_tokens"]] if cut else [*ids, end],
            "length" if cut else "stop",
        )

    def _render(self, body: Body) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                body["messages"], tools=body.get("tools"), tokenize=False, add_generation_prompt=True,
                **body.get("chat_template_kwargs", {}),
            )
        )  # fmt: skip

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def _as_json(answer: Any) -> Response:
    """A text as it is, called JSON all the same."""
    return Response(answer if isinstance(answer, str) else json.dumps(answer), media_type="application/json")


def _error(status: int, words: str) -> JSONResponse:
    # The client waits as long as it is told to, and a test has no time.
    return JSONResponse({"error": {"message": words, "code": status}}, status, {"retry-after-ms": "10"})
