"""One round of asking: the target's work on all conversations that have no answers yet."""

from __future__ import annotations

import time
from typing import Any

from draftsmith.chat import Chat
from draftsmith.config import Config
from draftsmith.conversations import Conversation, Unusable
from draftsmith.errors import DraftsmithError
from draftsmith.log import log
from draftsmith.regenerate import answers, talks
from draftsmith.regenerate.asking import FINISHED, Answerer, Failure, Question, Reply
from draftsmith.regenerate.journal import Journal, Ledger
from draftsmith.regenerate.progress import Progress
from draftsmith.regenerate.talks import Talk
from draftsmith.signals import Termination
from draftsmith.tokenize.marks import learn_marks

_PART = 64
_PART_SECONDS = 20.0
_TAIL = 64


def room(config: Config, target: dict[str, Any]) -> int:
    """Longest prompt and answer together, in tokens."""
    longest = config.tokenize.max_length + config.regenerate.max_tokens
    return min(longest, target.get("max_positions") or longest)


def ends(chat: Chat) -> frozenset[int]:
    """Token ids that end an answer."""
    return chat.end_ids | learn_marks(chat).ends


class Round:
    """Asks turn by turn and keeps what is finished."""

    def __init__(
        self,
        config: Config,
        target: dict[str, Any],
        chat: Chat,
        journal: Journal,
        ledger: Ledger,
        termination: Termination,
    ) -> None:
        self._config, self._chat, self._journal, self._termination = config, chat, journal, termination
        self._room = room(config, target)
        self._ends = ends(chat)
        self._running: dict[str, tuple[Talk, str]] = {}
        self._finished: list[dict[str, Any]] = []
        self._ledger = ledger

    def answer_all(self, conversations: list[Conversation], answerer: Answerer, most_failed: float) -> dict[str, Any]:
        """Answer every question; what is finished is in the journal, even when the engine or the server dies.

        Raises :class:`DraftsmithError` as soon as more than ``most_failed`` conversations failed: a server that refuses
        everything is not asked a hundred thousand times.
        """
        waiting = iter(conversations)
        with answerer:
            self._progress = Progress(len(conversations))
            kept = self._progress.begun
            try:
                while not self._termination.asked:
                    while len(self._running) < answerer.at_once and (one := next(waiting, None)) is not None:
                        self._ask(answerer, talks.start(one))
                    self._check(most_failed)
                    if not self._running:
                        break
                    for reply in answerer.wait():
                        self._take(answerer, reply)
                    now = time.monotonic()
                    if len(self._finished) >= _PART or (self._finished and now - kept > _PART_SECONDS):
                        self._keep()
                        kept = now
                    self._progress.show()
            finally:
                self._keep()
            described = answerer.described()
        self._progress.show(always=True)
        tokens, seconds = self._progress.tokens, self._progress.seconds
        rate = round(tokens / seconds, 1) if tokens and seconds else None
        return {"tokens": tokens, "seconds": round(seconds, 2), "tokens_per_second": rate, "by": described}

    def _ask(self, answerer: Answerer, talk: Talk) -> None:
        """Send the talk's next question, or end the talk."""
        messages = talk.messages(asking=True)
        try:
            text = self._chat.render(messages, talk.conversation.tools, prompt=True)
            prompt = self._chat.encode(text).ids
            if len(prompt) >= self._config.tokenize.max_length or len(prompt) >= self._room:
                raise Unusable("prompt_too_long", f"{len(prompt)} tokens")
        except Unusable as unusable:
            self._end(talk, unusable)
            return
        settings = self._config.regenerate
        question = Question(
            name=f"{talk.key}-{len(talk.answers)}",
            messages=messages,
            tools=talk.conversation.tools,
            prompt=prompt,
            tail=text[-_TAIL:],
            max_tokens=min(settings.max_tokens, self._room - len(prompt)),
            seed=talk.seed(settings.seed) if settings.temperature > 0 else None,
        )
        try:
            answerer.ask(question)
        except ValueError as error:
            # The engine refuses this request; it goes on with the others, and a later run asks again.
            self._fail(talk, Failure.of(error))
            return
        self._running[question.name] = (talk, question.tail)

    def _take(self, answerer: Answerer, reply: Reply) -> None:
        """Put an answer into its talk and ask on."""
        talk, tail = self._running.pop(reply.name)
        self._progress.tokens += reply.tokens
        if reply.failure is not None:
            self._fail(talk, reply.failure)
            return
        if reply.finish_reason not in FINISHED:
            words = f"the request was ended with {reply.finish_reason!r}"
            self._fail(
                talk, Failure(words, "no exception was raised here; the cause is in the engine's log", time.time())
            )
            return
        try:
            given = self._answer(tail, reply)
        except Unusable as unusable:
            self._end(talk, unusable)
            return
        self._progress.answers += 1
        if given["finish_reason"] == "length" and self._config.regenerate.unfinished != "keep":
            talk.ended = "truncated"
        elif answers.is_empty(given) and not given.get("reasoning_content"):
            talk.ended = "empty_answer"
        else:
            talk.take(given)
        if talk.finished:
            self._finish(talk)
        else:
            self._ask(answerer, talk)

    def _answer(self, tail: str, reply: Reply) -> answers.Answer:
        if reply.message is not None:
            return answers.from_message(tail, reply.message, reply.token_ids, reply.finish_reason, reply.tokens)
        return answers.from_ids(self._chat, tail, reply.token_ids or [], reply.finish_reason, self._ends)

    def _end(self, talk: Talk, unusable: Unusable) -> None:
        talk.ended, talk.detail = unusable.reason, unusable.detail
        self._finish(talk)

    def _finish(self, talk: Talk) -> None:
        self._progress.done += 1
        self._finished.append(talk.record())

    def _fail(self, talk: Talk, failure: Failure) -> None:
        self._progress.done += 1
        self._progress.failed += 1
        name, turn = talk.conversation.conversation_id, len(talk.answers) + 1
        self._ledger.add({"conversation_id": name, "key": talk.key, "turn": turn, **failure._asdict()})
        log(f"regenerate: conversation {name}, turn {turn} failed: {failure.error}")

    def _check(self, most_failed: float) -> None:
        failed = self._ledger.entries
        if len(failed) > most_failed:
            self._ledger.show()
            raise DraftsmithError(
                f"{len(failed)} conversations failed, more than data.max_dropped_fraction allows, the last by "
                f"{failed[-1]['error']}; mend the cause and run the same command again, which asks only for what is missing"
            )

    def _keep(self) -> None:
        self._journal.add(self._finished)
        self._finished = []
