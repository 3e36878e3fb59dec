"""OpenAI-compatible servers as one answerer: questions go to the least busy of them, answers come back as they are ready.

The requests run in an event loop of a thread of its own, so that the caller is the same as for an engine in this process.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any

from draftsmith.chat import Chat
from draftsmith.config import Config
from draftsmith.conversations import Conversation
from draftsmith.errors import DraftsmithError
from draftsmith.log import log
from draftsmith.regenerate import checks
from draftsmith.regenerate.asking import Failure, Question, Reply
from draftsmith.regenerate.server import Server
from draftsmith.regenerate.shapes import MalformedReply

_WAIT_SECONDS = 1.0
# How often a server that went away is asked whether it is back, while others go on.
_LOOK_AGAIN_SECONDS = 15.0


class Endpoint:
    """The servers of ``regenerate.endpoint``, checked on entering the ``with`` block.

    Args:
        config: settings of the sampling and of the servers.
        target: the content of target.json.
        chat: the target's tokenizer and template, with which a server must agree.
        room: longest prompt and answer together, in tokens.
        stops: ids that end an answer besides those that the server knows.
        todo: the conversations to be asked, of which some are samples for the checks.
    """

    def __init__(
        self,
        config: Config,
        target: dict[str, Any],
        chat: Chat,
        room: int,
        stops: Sequence[int],
        todo: Sequence[Conversation],
    ) -> None:
        self._settings, self._target, self._chat, self._room, self._todo = config.regenerate, target, chat, room, todo
        self._args, self._stops = config.tokenize.template_args, stops
        self.at_once = self._settings.concurrency * len(self._settings.endpoints)
        self._servers: list[Server] = []
        self._ready: queue.SimpleQueue[Reply | BaseException] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._watched: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Endpoint:
        self._key = _key(self._settings.api_key_env)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="draftsmith-endpoint", daemon=True)
        self._thread.start()
        try:
            self._run(self._connect())
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def ask(self, question: Question) -> None:
        """Send a question; its answer, or its failure, comes out of :meth:`wait`."""
        asyncio.run_coroutine_threadsafe(self._answer(question), self._loop).add_done_callback(self._ended)

    def wait(self) -> list[Reply]:
        """The replies that are there, after at most a second.

        Raises :class:`DraftsmithError` when no server is left.
        """
        if self._error is not None:
            raise self._error
        replies: list[Reply] = []
        try:
            found = self._ready.get(timeout=_WAIT_SECONDS)
            while True:
                if isinstance(found, BaseException):
                    # What came before it is kept first.
                    self._error = found
                    break
                replies.append(found)
                found = self._ready.get_nowait()
        except queue.Empty:
            pass
        if self._error is not None and not replies:
            raise self._error
        return replies

    def described(self) -> dict[str, Any]:
        """Which servers answered, and how they were asked."""
        return {"servers": [{"address": one.address, "model": one.model, "api": one.way} for one in self._servers]}

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _connect(self) -> None:
        for address in self._settings.endpoints:
            server = Server(address, self._settings, self._key, self._args, self._stops, self._target["vocab_size"])
            self._servers.append(server)
            try:
                await checks.examine(server, self._settings, self._target, self._chat, self._room, self._todo)
            except DraftsmithError as error:
                raise DraftsmithError(self._clean(str(error))) from None

    async def _answer(self, question: Question) -> None:
        from openai import (
            APIConnectionError,
            APIStatusError,
            APITimeoutError,
            AuthenticationError,
            PermissionDeniedError,
        )

        failure: Failure | None = None
        tried: set[Server] = set()
        while (server := self._least_busy(tried)) is not None:
            tried.add(server)
            server.busy += 1
            try:
                self._ready.put(await server.ask(question))
                return
            except (AuthenticationError, PermissionDeniedError) as error:
                raise DraftsmithError(checks.refused_key(server, self._settings, error.status_code)) from None
            except APIConnectionError as error:
                failure = self._failure(error, server)
                # A timeout, or a connection that ended within an answer, may be this question's fault alone.
                if not isinstance(error, APITimeoutError) and not await self._is_there(server):
                    self._lose(server, error)
            except APIStatusError as error:
                failure = self._failure(error, server)
                if error.status_code < 500 and error.status_code != 429:
                    # Refused; another server of the same target would do so as well.
                    break
            except Exception as error:
                failure = self._failure(error, server)
                break
            finally:
                server.busy -= 1
        if not any(server.up for server in self._servers):
            raise DraftsmithError(
                f"{', '.join(self._settings.endpoints)}: no server answers any more; start it again and run the same command "
                "again, which asks only for what is missing"
            )
        assert failure is not None
        self._ready.put(Reply(question.name, failure=failure))

    def _least_busy(self, tried: set[Server]) -> Server | None:
        free = [server for server in self._servers if server.up and server not in tried]
        return min(free, key=lambda server: server.busy, default=None)

    async def _is_there(self, server: Server) -> bool:
        from openai import OpenAIError

        try:
            return any(card["id"] == server.model for card in await server.models(tries=1))
        except (OpenAIError, MalformedReply):
            return False

    def _lose(self, server: Server, error: BaseException) -> None:
        if server.up:
            server.up = False
            log(f"regenerate: {server.address} does not answer any more ({checks.cause(error)})")
            task = asyncio.get_running_loop().create_task(self._look_again(server))
            self._watched.add(task)
            task.add_done_callback(self._watched.discard)

    async def _look_again(self, server: Server) -> None:
        while not server.up:
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)
            server.up = await self._is_there(server)
        log(f"regenerate: {server.address} is back")

    def _ended(self, done: Future[None]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            self._ready.put(error)

    def _failure(self, error: BaseException, server: Server) -> Failure:
        found = Failure.of(error)
        return Failure(self._clean(f"{server.address}: {found.error}"), self._clean(found.traceback), found.time)

    def _clean(self, text: str) -> str:
        # A server may repeat the key in its refusal.
        return text.replace(self._key, "***") if self._key else text

    def _close(self) -> None:
        async def end() -> None:
            rest = asyncio.all_tasks() - {asyncio.current_task()}
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)
            for server in self._servers:
                await server.client.close()

        self._run(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise DraftsmithError(
            f"{variable}: no such environment variable, or an empty one; set it to the server's API key, or correct "
            "regenerate.api_key_env"
        )
    return key
