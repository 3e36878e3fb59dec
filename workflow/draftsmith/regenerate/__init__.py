"""regenerate: the target writes its own answers to the source's questions, for the draft to learn.

Each conversation goes on by itself: as soon as an answer is there, the next question is asked, so that the engine never
waits for the slowest answer of a batch. What is finished is kept in part files, in a folder for the target and the
settings: a run that was ended goes on, and one that asks only for what is there does not even load the model.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from draftsmith import engine, hardware
from draftsmith.chat import Chat
from draftsmith.config import Config
from draftsmith.conversations import Conversation, DropCount, Dropped, Unusable, read_conversations
from draftsmith.errors import DraftsmithError
from draftsmith.files import atomic_path, read_json, write_json
from draftsmith.log import log
from draftsmith.marks import learn_marks
from draftsmith.regenerate import talks
from draftsmith.regenerate.generator import Generated, Generator
from draftsmith.regenerate.journal import Journal
from draftsmith.regenerate.talks import Talk
from draftsmith.signals import EXIT_TERMINATED, Termination

REASONS = {
    "no_question": "no user message",
    "duplicate": "it asks what another conversation asks",
    "prompt_too_long": "the question lies behind tokenize.max_length",
    "empty_answer": "the target ended its turn at once",
    "truncated": "the answer was cut at regenerate.max_tokens, and regenerate.keep_truncated is off",
    "failed": "the engine failed on it; the report has the traceback",
}
"""Reason codes of this stage with what each means, besides those of conversations.py and masking.py."""

# Raise it when the same settings come to give other answers.
_FORMAT = 1
_PART = 64
_PART_SECONDS = 60.0
_LOG_SECONDS = 10.0


def run(config: Config, *, target: Path, workdir: Path, conversations: Path, report: Path) -> None:
    """Answer the questions of ``data.sources`` and write ``conversations`` (JSONL) and ``report``.

    Parts go to a folder of their own in ``workdir``. Raises :class:`DraftsmithError` when more than
    ``data.max_dropped_fraction`` of the conversations got no answer.
    """
    described = read_json(target)
    chat = Chat.load(described, config.tokenize.template_args)
    key = _fingerprint(config, described, chat)
    journal = Journal(workdir / key)
    dropped = DropCount()
    asked = _Questions(dropped)
    wanted = list(asked.read(read_conversations(config.data.sources)))
    todo = [conversation for conversation in wanted if conversation.prompt_key() not in journal]
    log(f"regenerate: {len(wanted)} conversations, {len(wanted) - len(todo)} are answered already ({workdir / key})")
    figures: dict[str, Any] = {"tokens": 0, "seconds": 0.0, "tokens_per_second": None, "failed": []}
    if todo:
        with Termination() as termination:
            round_ = _Round(config, described, chat, journal, termination)
            figures = round_.answer_all(todo)
        if termination.asked:
            log(
                f"regenerate: ended by {termination.name}; {len(journal)} conversations are kept, run the same command again to go on"
            )
            sys.exit(EXIT_TERMINATED)
    failed = {entry["conversation_id"]: entry for entry in figures["failed"]}
    counts, finishes, shortened = Counter[str](), Counter[str](), Counter[str]()
    with atomic_path(conversations) as temporary, open(temporary, "w") as lines:
        for conversation in wanted:
            place = f"{conversation.source}, {conversation.conversation_id}"
            if conversation.prompt_key() not in journal:
                error = failed.get(conversation.conversation_id, {}).get("error", "")
                dropped.add(place, "failed", error)
                continue
            talk = _restored(conversation, journal.get(conversation.prompt_key()))
            if not talk.answers:
                dropped.add(place, str(talk.ended), talk.detail)
                continue
            if talk.ended:
                shortened[talk.ended] += 1
            finishes.update(given["finish_reason"] for given in talk.answers)
            counts.update(
                kept=1, answers=len(talk.answers), answer_tokens=sum(len(given["token_ids"]) for given in talk.answers)
            )
            row = talks.completed(conversation, talk, described["fingerprint"]).as_row()
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")
        dropped.check(asked.total, config.data.max_dropped_fraction, ("duplicate",))
        if not counts["kept"]:
            raise DraftsmithError("no conversation got an answer; is there a user message in any?")
    write_json(
        report,
        {
            "conversations": asked.total,
            **{name: counts[name] for name in ("kept", "answers", "answer_tokens")},
            "finish_reasons": dict(finishes),
            "dropped": dict(dropped.counts.most_common()),
            "dropped_examples": dropped.examples,
            "shortened": dict(shortened),
            "reused": len(wanted) - len(todo),
            "generated_tokens": figures["tokens"],
            "seconds": figures["seconds"],
            "tokens_per_second": figures["tokens_per_second"],
            "failed": figures["failed"],
            "fingerprint": key,
            "settings": config.regenerate.model_dump(mode="json"),
        },
    )
    dropped.report("regenerate")
    log(
        f"regenerate: {counts['kept']} conversations with {counts['answers']} answers of {counts['answer_tokens']} tokens, {dict(finishes)}"
    )


def _fingerprint(config: Config, target: dict[str, Any], chat: Chat) -> str:
    """Names the folder of everything that the same target, settings and template would answer alike."""
    what = {
        "format": _FORMAT,
        "target": target["fingerprint"],
        "dtype": hardware.target_dtype(config.target.dtype, target["torch_dtype"]),
        "settings": config.regenerate.model_dump(mode="json", exclude={"enabled"}),
        "template": chat.template_sha256,
        "template_args": config.tokenize.template_args,
        "max_length": config.tokenize.max_length,
        "ends": sorted(chat.end_ids),
        **({"engine_args": config.engine.args} if config.engine.args else {}),
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def _restored(conversation: Conversation, record: dict[str, Any]) -> Talk:
    talk = talks.start(conversation)
    talk.answers, talk.ended, talk.detail = record["answers"], record["ended"], record["detail"]
    return talk


class _Questions:
    """Reads what can be asked; the rest is counted. Asking the same twice would teach nothing."""

    def __init__(self, dropped: DropCount) -> None:
        self.total = 0
        self._dropped = dropped

    def read(self, given: Iterable[Conversation | Dropped]) -> Iterable[Conversation]:
        seen = set()
        for conversation in given:
            self.total += 1
            if isinstance(conversation, Dropped):
                self._dropped.add(conversation.where, conversation.reason, conversation.detail)
                continue
            place = f"{conversation.source}, {conversation.conversation_id}"
            key = conversation.prompt_key()
            if not talks.questions(conversation.messages):
                self._dropped.add(place, "no_question")
            elif key in seen:
                self._dropped.add(place, "duplicate")
            else:
                seen.add(key)
                yield conversation


class _Round:
    """One engine's work on all conversations that have no answers yet."""

    def __init__(
        self, config: Config, target: dict[str, Any], chat: Chat, journal: Journal, termination: Termination
    ) -> None:
        self._config, self._target, self._chat, self._journal, self._termination = (
            config,
            target,
            chat,
            journal,
            termination,
        )
        longest = config.tokenize.max_length + config.regenerate.max_tokens
        self._room = min(longest, target.get("max_positions") or longest)
        self._ends = chat.end_ids | learn_marks(chat).ends
        self._running: dict[str, tuple[Talk, str]] = {}
        self._finished: list[dict[str, Any]] = []
        self._failed: list[dict[str, Any]] = []
        self._done = self._tokens = 0

    def answer_all(self, conversations: list[Conversation]) -> dict[str, Any]:
        """Answer every question; what is finished is in the journal, even when the engine dies."""
        waiting = iter(conversations)
        # More than the engine works on at once, so that it never runs dry; few, so that an abrupt end costs little.
        at_once = 2 * self._config.engine.max_num_seqs
        engine.check_granted(self._config, None)
        begun = shown = kept = time.monotonic()
        with Generator(self._config, self._target, self._room, sorted(self._ends)) as generator:
            begun = time.monotonic()
            try:
                while not self._termination.asked:
                    while len(self._running) < at_once and (conversation := next(waiting, None)) is not None:
                        self._ask(generator, talks.start(conversation))
                    if not self._running:
                        break
                    for generated in generator.step():
                        self._take(generator, generated)
                    now = time.monotonic()
                    if len(self._finished) >= _PART or (self._finished and now - kept > _PART_SECONDS):
                        self._keep()
                        kept = now
                    if now - shown > _LOG_SECONDS:
                        shown = now
                        rate = self._tokens / (now - begun)
                        log(
                            f"regenerate: {self._done}/{len(conversations)} conversations, {self._tokens} tokens, {rate:,.0f} tokens/s"
                        )
            finally:
                self._keep()
        seconds = time.monotonic() - begun
        return {
            "tokens": self._tokens,
            "seconds": round(seconds, 2),
            "tokens_per_second": round(self._tokens / seconds, 1) if seconds else None,
            "failed": self._failed,
        }

    def _ask(self, generator: Generator, talk: Talk) -> None:
        """Send the talk's next question, or end the talk."""
        try:
            text = self._chat.render(talk.messages(asking=True), talk.conversation.tools, prompt=True)
            prompt = self._chat.encode(text).ids
            if len(prompt) >= self._config.tokenize.max_length or len(prompt) >= self._room:
                raise Unusable("prompt_too_long", f"{len(prompt)} tokens")
        except Unusable as unusable:
            talk.ended, talk.detail = unusable.reason, unusable.detail
            self._finish(talk)
            return
        request = f"{talk.key}-{len(talk.answers)}"
        most = min(self._config.regenerate.max_tokens, self._room - len(prompt))
        try:
            generator.add(request, prompt, most, talk.seed(self._config.regenerate.seed))
        except ValueError as error:
            # The engine refuses this request; it goes on with the others, and a later run asks again.
            self._fail(talk, f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))
            return
        self._running[request] = (talk, text[-64:])

    def _take(self, generator: Generator, generated: Generated) -> None:
        """Put an answer into its talk and ask on."""
        talk, tail = self._running.pop(generated.request)
        self._tokens += len(generated.token_ids)
        if generated.finish_reason not in ("stop", "length"):
            self._fail(
                talk, f"vLLM ended the request with {generated.finish_reason!r}", "the cause is in the engine's log"
            )
            return
        given = talks.answer(self._chat, tail, generated.token_ids, generated.finish_reason, self._ends)
        cut, blank = given["finish_reason"] == "length", not given["content"].strip()
        if cut and not self._config.regenerate.keep_truncated:
            talk.ended = "truncated"
        elif blank and not given.get("reasoning_content"):
            talk.ended = "empty_answer"
        else:
            talk.answers.append(given)
            # Reasoning that was cut before the answer is worth learning, but nothing follows from it.
            if blank and not talk.finished:
                talk.ended = "truncated"
        if talk.finished:
            self._finish(talk)
        else:
            self._ask(generator, talk)

    def _finish(self, talk: Talk) -> None:
        self._done += 1
        self._finished.append(talk.record())

    def _fail(self, talk: Talk, error: str, trace: str) -> None:
        self._done += 1
        self._failed.append(
            {
                "conversation_id": talk.conversation.conversation_id,
                "turn": len(talk.answers) + 1,
                "error": error,
                "traceback": trace,
            }
        )
        log(
            f"regenerate: conversation {talk.conversation.conversation_id}, turn {len(talk.answers) + 1} failed: {error}\n{trace}"
        )

    def _keep(self) -> None:
        self._journal.add(self._finished)
        self._finished = []
