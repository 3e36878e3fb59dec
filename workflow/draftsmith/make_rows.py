"""Rows of many conversations, cut to length, by one process or by as many as there are cores."""

from __future__ import annotations

import multiprocessing
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from draftsmith import hardware, masking
from draftsmith.chat import Chat
from draftsmith.config import Tokenize
from draftsmith.conversations import Conversation, Unusable
from draftsmith.log import log
from draftsmith.marks import Marks

REASONS = {
    "too_long": "every answer lies behind tokenize.max_length",
    "too_short": "fewer tokens than tokenize.min_supervised_tokens are supervised",
    "token_out_of_range": "a token id is not in the model's vocabulary",
}
"""Reason codes of :meth:`RowMaker.make` with what each means, besides those of masking.py."""

_CHUNK = 64
# Not forked: a tokenizer that has run has threads, whose locks a fork would copy as they are.
_START = "spawn"


class TokenRow(NamedTuple):
    """A row: token ids, half-open supervised spans, and whether it was cut at the longest length."""

    ids: list[int]
    spans: list[tuple[int, int]]
    cut: bool


@dataclass
class Made:
    """What became of one conversation: rows, or the ``reason`` why there are none.

    ``lost`` counts rows that were left out beside others that stayed; ``prompt_tokens`` is the length of the prompt of
    the last answer; ``by_turn`` tells that each answer has a row of its own; ``straddled`` is as in
    :class:`draftsmith.masking.MaskedRow`.
    """

    rows: list[TokenRow] = field(default_factory=list)
    reason: str = ""
    detail: str = ""
    lost: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    by_turn: bool = False
    straddled: int = 0


@dataclass(frozen=True)
class Plan:
    """All that a worker needs: target.json's content, the settings, and what was learnt from samples."""

    target: dict[str, Any]
    settings: Tokenize
    method: masking.Method
    marks: Marks


class RowMaker:
    """Makes the rows of one conversation after the other."""

    def __init__(self, plan: Plan, chat: Chat | None = None) -> None:
        self._settings, self._vocabulary = plan.settings, plan.target["vocab_size"]
        chat = chat or Chat.load(plan.target, plan.settings.template_args)
        self._masker = masking.Masker(chat, plan.method, plan.marks, plan.target["fingerprint"])

    def make(self, conversation: Conversation) -> Made:
        """Rows that are cut to length and long enough, or the reason why there are none."""
        try:
            rows = self._masker.rows(conversation)
        except Unusable as unusable:
            return Made(reason=unusable.reason, detail=unusable.detail)
        except Exception as error:
            error.add_note(f"while tokenising conversation {conversation.conversation_id} of {conversation.source}")
            raise
        made = Made(
            by_turn=len(rows) > 1,
            straddled=sum(row.straddled for row in rows),
            prompt_tokens=rows[-1].spans[-1][0],
        )
        for row in rows:
            kept = self._shorten(row)
            if isinstance(kept, TokenRow):
                made.rows.append(kept)
            else:
                made.lost[kept] += 1
        if not made.rows:
            made.reason = next(iter(made.lost))
            made.lost = Counter()
        return made

    def _shorten(self, row: masking.MaskedRow) -> TokenRow | str:
        longest = self._settings.max_length
        spans = [(start, min(end, longest)) for start, end in row.spans if start < longest]
        if not spans:
            return "too_long"
        if sum(end - start for start, end in spans) < self._settings.min_supervised_tokens:
            return "too_short"
        ids = row.ids[: spans[-1][1]]
        if max(ids) >= self._vocabulary:
            return "token_out_of_range"
        return TokenRow(ids, spans, len(row.ids) > longest)


def make_all(
    conversations: Iterable[Conversation], plan: Plan, chat: Chat, *, pool: bool
) -> Iterator[tuple[Conversation, Made]]:
    """Each conversation with what became of it, in order; ``pool`` spreads the work over the cores.

    No more than a few chunks for each worker are in memory at once.
    """
    workers = len(hardware.cores())
    if not pool or workers < 2:
        maker = RowMaker(plan, chat)
        for conversation in conversations:
            yield conversation, maker.make(conversation)
        return
    log(f"tokenize: {workers} processes")
    source = iter(conversations)
    context = multiprocessing.get_context(_START)
    with ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(plan,)) as executor:
        waiting: deque[tuple[list[Conversation], Future[list[Made]]]] = deque()
        try:
            while True:
                while len(waiting) < 3 * workers and (chunk := list(islice(source, _CHUNK))):
                    waiting.append((chunk, executor.submit(_make_chunk, chunk)))
                if not waiting:
                    break
                chunk, future = waiting.popleft()
                yield from zip(chunk, future.result(), strict=True)
        finally:
            executor.shutdown(cancel_futures=True)


_maker: RowMaker | None = None


def _begin(plan: Plan) -> None:
    global _maker
    _maker = RowMaker(plan)


def _make_chunk(chunk: list[Conversation]) -> list[Made]:
    assert _maker is not None
    return [_maker.make(conversation) for conversation in chunk]
