"""Which tokens of a conversation the target would write: each answer with its end-of-turn token, nothing of headers.

Three ways find them, and they are compared on samples:

- *prefix*: an answer begins where the conversation before it ends, rendered with the header of the answer to come, since
  that is the prompt which a server is given. It ends with the conversation up to and with it. With a fast tokenizer both
  places are looked up in the offsets of the whole; with a slow one the pieces between them are encoded and joined.
- *generation_tags*: the template's own ``{% generation %}`` blocks, freed of headers and of what follows the end of turn.
- *token_scan*: the ids of the header and of the end of turn, learnt from a small conversation and searched for.

A conversation is one row where its earlier renderings are beginnings of the whole. Where the template rewrites history
(drops reasoning, moves the system message), each answer gets a row of its own, rendered as it would be served.

Supervised is what the target emits when it is served: the answer and the token that it stops with. GLM's template writes
no end of turn; the target stops with the mark of the role that comes next (`<|user|>`, behind a tool call
`<|observation|>`), which its generation config lists. So that mark is supervised with the answer before it, and put
behind the last answer of a row. gpt-oss ends an answer with `<|return|>`, which becomes `<|end|>` in history: it has
rewritten history, and each answer gets a row that ends with `<|return|>`.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from draftsmith.chat import Chat, Encoded
from draftsmith.conversations import Conversation, Message, Unusable
from draftsmith.tokenize.marks import Marks, common

Method = Literal["prefix", "generation_tags", "token_scan"]
Span = tuple[int, int]

METHODS: tuple[Method, ...] = ("prefix", "generation_tags", "token_scan")
"""In the order of trust: the first renders what a server would, the others rest on the template's or the ids' honesty."""

REASONS = {
    "no_answer": "no assistant message follows a user message",
    "empty_answer": "an assistant message has neither text nor reasoning nor a tool call",
    "template_refused": "the chat template raised its own error, for instance on the order of roles",
    "template_failed": "the chat template failed on the messages",
    "not_rendered": "the chat template leaves out a tool call, or all of an answer that is reasoning alone",
    "not_aligned": "the answers could not be found again in the tokens",
    "reasoning_missing": "the template's prompt opens a reasoning block that the answer does not have",
    "end_of_turn_inside": "an answer holds the text of the end-of-turn token",
}
"""Reason codes of :meth:`Masker.rows` with what each means."""

_OPENED_REASONING = re.compile(r"<think>(\s*)$")
_CLOSE_REASONING = "</think>"
_REASONING_BLOCK = re.compile(r"(\s*<think>.*?)</think>", re.DOTALL)


@dataclass(slots=True)
class MaskedRow:
    """Token ids of a row, and half-open supervised spans in them, ascending; the row ends with the last span.

    ``straddled`` counts answers whose first characters share a token with their header; they begin at the next token.
    ``restored`` tells that the row holds reasoning which the template left out.
    """

    ids: list[int]
    spans: list[Span]
    straddled: int = 0
    restored: bool = False


class _NotFound(Exception):
    """A method does not apply to this conversation."""


@dataclass
class _Texts:
    """Renderings of one conversation up to its last answer; ``prompts`` and ``closed`` run along ``answers``."""

    messages: list[Message]
    answers: list[int]
    prompts: list[str]
    closed: list[str]
    whole: str = field(init=False)

    def __post_init__(self) -> None:
        self.whole = self.closed[-1]

    @property
    def stable(self) -> bool:
        """Whether every earlier rendering is a beginning of the whole."""
        return all(self.whole.startswith(text) for text in (*self.closed, *self.prompts))


Rendered = dict[int, tuple[Conversation, _Texts]]
"""Renderings by the id of their conversation, which is held so that no other object takes the id."""


class Masker:
    """Turns conversations into rows with supervised spans.

    Args:
        chat: tokenizer and template.
        method: as :func:`draftsmith.tokenize.mask_method.choose` found it.
        marks: as :func:`draftsmith.tokenize.marks.learn_marks` found them.
        fingerprint: the target's; token ids that the stage regenerate noted are used only if they are its own.
    """

    def __init__(self, chat: Chat, method: Method, marks: Marks, fingerprint: str = "") -> None:
        self.chat, self.method, self.marks, self._fingerprint = chat, method, marks, fingerprint
        self._ends = marks.ends | chat.end_ids or chat.special
        self._blank: dict[tuple[int, ...], bool] = {}
        self._rendered: Rendered = {}

    def render(self, conversations: Sequence[Conversation]) -> Rendered:
        """What :meth:`rows` of these begins with; whatever fails is left out, and fails again there."""
        rendered: Rendered = {}
        for conversation in conversations:
            with suppress(Exception):
                texts = self._texts(conversation.messages, conversation.tools, answer_indices(conversation.messages))
                rendered[id(conversation)] = conversation, texts
        return rendered

    def to_encode(self, rendered: Rendered) -> list[str]:
        """The texts among these that :meth:`rows` is going to encode."""
        return (
            [] if self.method == "generation_tags" else [texts.whole for _, texts in rendered.values() if texts.stable]
        )

    def have(self, rendered: Rendered, encoded: dict[str, Encoded]) -> None:
        """Let :meth:`rows` find this done; what was done before for others is forgotten."""
        self._rendered = rendered
        self.chat.have(encoded)

    def rows(self, conversation: Conversation) -> list[MaskedRow]:
        """One row, or one for each answer where the template rewrites history.

        Raises :class:`Unusable` with one of :data:`REASONS`.
        """
        messages, tools = conversation.messages, conversation.tools
        answers = answer_indices(messages)
        written = self._written(conversation, answers)
        _, texts = self._rendered.pop(id(conversation), (None, None))
        texts = texts or self._texts(messages, tools, answers)
        lost = any(self._reasoning_lost(texts, place) for place in range(len(texts.prompts)))
        rows: list[MaskedRow] = []
        if texts.stable and not lost:
            row = self._locate(texts, tools)
            if all(
                ids is None or ids == row.ids[start:end] for ids, (start, end) in zip(written, row.spans, strict=True)
            ):
                rows = [row]
        if not rows:
            rows = [self._turn(texts, tools, place, written[place]) for place in range(len(answers))]
        self._check_calls(rows, [messages[index] for index in answers])
        for row in rows:
            for start, end in row.spans:
                if row.ids[end - 1] in self.chat.special and row.ids[end - 1] in row.ids[start : end - 1]:
                    raise Unusable("end_of_turn_inside")
        return rows

    def _check_calls(self, rows: Sequence[MaskedRow], answers: Sequence[Message]) -> None:
        """What a template does not write would be learnt as an answer that ends too early, or at once."""
        spans = [row.ids[start:end] for row in rows for start, end in row.spans]
        for ids, answer in zip(spans, answers, strict=True):
            names = [str(call["function"]["name"]) for call in answer.get("tool_calls") or ()]
            if not names and answer["content"].strip():
                continue
            text = self.chat.decode([token for token in ids if token not in self._ends])
            if lost := next((name for name in names if name not in text and json.dumps(name)[1:-1] not in text), None):
                raise Unusable("not_rendered", f"a call of {lost}")
            if not text.strip():
                raise Unusable("not_rendered", "its reasoning")

    def prompt_ids(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> list[int]:
        """Token ids of the prompt that a server builds of ``messages``."""
        return self.chat.encode(self.chat.render(messages, tools, prompt=True)).ids

    def _written(self, conversation: Conversation, answers: Sequence[int]) -> list[list[int] | None]:
        # What the target itself wrote is kept to the token: its text might be encoded in another way.
        noted = conversation.generated or {}
        ids = noted.get("token_ids")
        if noted.get("fingerprint") == self._fingerprint and isinstance(ids, list) and len(ids) == len(answers):
            return list(ids)
        return [None] * len(answers)

    def _texts(self, messages: list[Message], tools: list[dict[str, Any]] | None, answers: list[int]) -> _Texts:
        prompts, closed = self.chat.renderings(messages, tools, answers, prompts=self.method == "prefix")
        closed = [text + self.marks.stop_after(messages[index]) for text, index in zip(closed, answers, strict=True)]
        return _Texts(messages, answers, prompts, closed)

    def _reasoning_lost(self, texts: _Texts, place: int) -> bool:
        """Whether the template leaves out the reasoning of an answer to a prompt that asks for it."""
        reasoning = texts.messages[texts.answers[place]].get("reasoning_content")
        if not reasoning or not _OPENED_REASONING.search(texts.prompts[place]):
            return False
        shared = common(texts.prompts[place], texts.closed[place])
        block, closed, _ = texts.closed[place][shared:].partition(_CLOSE_REASONING)
        return not closed or reasoning.strip() not in block

    def _locate(self, texts: _Texts, tools: list[dict[str, Any]] | None) -> MaskedRow:
        messages, answers = texts.messages, texts.answers
        if self.method == "prefix":
            try:
                return self._by_prefix(
                    texts.whole,
                    [len(text) for text in texts.prompts],
                    [len(text) for text in texts.closed],
                    messages,
                    answers,
                )
            except _NotFound:
                # A slow tokenizer that joins tokens across the borders of an answer.
                return self._try(self._by_scan, texts.whole, messages, answers)
        if self.method == "generation_tags":
            return self._try(self._by_tags, tools, messages, answers)
        return self._try(self._by_scan, texts.whole, messages, answers)

    def _turn(
        self, texts: _Texts, tools: list[dict[str, Any]] | None, place: int, written: list[int] | None
    ) -> MaskedRow:
        """The row of one answer alone, as it is served: its prompt and what the target writes."""
        index = texts.answers[place]
        messages = texts.messages[: index + 1]
        if written is not None:
            asked = self.prompt_ids(messages[:-1], tools)
            return MaskedRow([*asked, *written], [(len(asked), len(asked) + len(written))])
        if self.method != "prefix":
            one = _Texts(messages, [index], [], [texts.closed[place]])
            return self._locate(one, tools)
        prompt, closed = texts.prompts[place], texts.closed[place]
        restored = self._reasoning_lost(texts, place) or not closed.startswith(prompt)
        if restored:
            closed = _restore_reasoning(prompt, closed, messages[-1].get("reasoning_content"))
        row = self._locate(_Texts(messages, [index], [prompt], [closed]), tools)
        row.restored = restored
        return row

    def _try(self, method: Callable[..., MaskedRow], *args: Any) -> MaskedRow:
        try:
            return method(*args)
        except _NotFound as reason:
            raise Unusable("not_aligned", str(reason)) from None

    def _by_prefix(
        self, whole: str, begins: list[int], ends: list[int], messages: list[Message], answers: list[int]
    ) -> MaskedRow:
        ids, bounds, straddled = (self._by_offsets if self.chat.fast else self._by_pieces)(whole, begins, ends)
        spans = [self._close(ids, *bound, messages[index]) for bound, index in zip(bounds, answers, strict=True)]
        return _cut(ids, spans, straddled)

    def _by_offsets(self, whole: str, begins: list[int], ends: list[int]) -> tuple[list[int], list[Span], int]:
        encoded: Encoded = self.chat.encode(whole)
        assert encoded.place is not None
        place, tokens = encoded.place, range(len(encoded.ids))
        bounds, straddled = [], 0
        for begin, end in zip(begins, ends, strict=True):
            first = bisect_right(tokens, begin, key=lambda token: place(token)[1])
            if first < len(encoded.ids) and place(first)[0] < begin:
                straddled += 1
                first += 1
            bounds.append((first, bisect_left(tokens, end, key=lambda token: place(token)[0])))
        return *self._as_served(encoded.ids, bounds), straddled

    def _as_served(self, ids: list[int], bounds: list[Span]) -> tuple[list[int], list[Span]]:
        """The same with each header encoded as in a prompt, where no answer follows that its end could be joined with."""
        tail = self.marks.tail
        if not tail or all(tuple(ids[start - len(tail) : start]) == tail for start, _ in bounds):
            return ids, bounds
        served: list[int] = []
        moved, done = [], 0
        for start, end in bounds:
            last = next((place for place in range(start - 1, done - 1, -1) if ids[place] in self.chat.special), None)
            served += ids[done:start] if last is None or ids[last] != tail[0] else [*ids[done:last], *tail]
            moved.append((len(served), len(served) + end - start))
            served += ids[start:end]
            done = end
        return served + ids[done:], moved

    def _by_pieces(self, whole: str, begins: list[int], ends: list[int]) -> tuple[list[int], list[Span], int]:
        ids: list[int] = []
        bounds, done = [], 0
        for begin, end in zip(begins, ends, strict=True):
            ids += self.chat.encode(whole[done:begin]).ids
            first = len(ids)
            ids += self.chat.encode(whole[begin:end]).ids
            bounds.append((first, len(ids)))
            done = end
        # Pieces may be encoded in another way than the whole, as a prompt is; some tokenizers add a space to each.
        if ids != self.chat.encode(whole[:done]).ids and self.chat.decode(ids) != whole[:done]:
            raise _NotFound("the pieces are encoded as another text than the whole")
        return ids, bounds, 0

    def _by_tags(self, tools: list[dict[str, Any]] | None, messages: list[Message], answers: list[int]) -> MaskedRow:
        shown = messages[: answers[-1] + 1]
        ids, mask = self.chat.tagged(shown, tools)
        if stop := self.marks.stop_after(shown[-1]):
            stops = self.chat.encode(stop).ids
            ids, mask = ids + stops, mask + [0] * len(stops)
        edges = [
            place
            for place in range(len(mask) + 1)
            if (mask[place - 1] if place else 0) != (mask[place] if place < len(mask) else 0)
        ]
        runs = list(zip(edges[::2], edges[1::2], strict=True))
        spans = []
        for (start, end), message in zip(
            self._pick(ids, runs, shown, answers), (messages[index] for index in answers), strict=True
        ):
            header = self.marks.header
            kept = next(
                (
                    k
                    for k in range(min(len(header), end - start), 0, -1)
                    if tuple(ids[start : start + k]) == header[-k:]
                ),
                0,
            )
            if self._last_end(ids, start, end) is None and end < len(ids) and ids[end] in self._ends:
                end += 1
            spans.append(self._close(ids, self._behind_prompt(ids, start + kept), end, message))
        return _cut(ids, spans)

    def _by_scan(self, whole: str, messages: list[Message], answers: list[int]) -> MaskedRow:
        header, ends = self.marks.header, self._ends
        if not header:
            raise _NotFound("no header or end of turn could be learnt")
        ids = self.chat.encode(whole).ids
        runs, place = [], 0
        while (found := _find(ids, header, place)) >= 0:
            start = found + len(header)
            stop = next((end for end in range(start, len(ids)) if ids[end] in ends), None)
            if stop is None:
                break
            if 0 <= _find(ids, header, start) < stop:
                raise _NotFound("an answer follows another one that has no end of turn")
            runs.append((start, stop + 1))
            place = stop + 1
        shown = messages[: answers[-1] + 1]
        spans = [
            self._close(ids, self._behind_prompt(ids, run[0]), run[1], messages[index])
            for run, index in zip(self._pick(ids, runs, shown, answers), answers, strict=True)
        ]
        return _cut(ids, spans)

    def _behind_prompt(self, ids: list[int], start: int) -> int:
        """The start of an answer behind what the prompt writes after the header."""
        opens = self.marks.opens
        return start + len(opens) if tuple(ids[start : start + len(opens)]) == opens else start

    def _pick(self, ids: list[int], runs: list[Span], messages: list[Message], answers: list[int]) -> list[Span]:
        """The runs of ``answers`` among those of all assistant messages."""
        assistants = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if len(answers) == 1 and runs:
            # A row of one answer: the last, whatever became of the history.
            if not self._is_blank([token for token in ids[runs[-1][1] :] if token not in self._ends]):
                raise _NotFound("the last answer that was found is not the end of the row")
            return runs[-1:]
        if len(runs) != len(assistants):
            raise _NotFound(f"{len(runs)} answers were found and {len(assistants)} expected")
        return [run for run, index in zip(runs, assistants, strict=True) if index in answers]

    def _last_end(self, ids: list[int], start: int, end: int) -> int | None:
        """Place of the last token of ids[start:end] that ends a turn, if only white space follows it there."""
        last = next((place for place in range(end - 1, start - 1, -1) if ids[place] in self._ends), None)
        return last if last is not None and self._is_blank(ids[last + 1 : end]) else None

    def _close(self, ids: list[int], start: int, end: int, message: Message) -> Span:
        """Let a span end with its end-of-turn token, or before it where the answer was cut off and never had one."""
        last = self._last_end(ids, start, end)
        if last is not None:
            end = last if message.get("truncated") else last + 1
        else:
            while end > start and self._is_blank(ids[end - 1 : end]):
                end -= 1
        if end <= start:
            raise Unusable("not_aligned", "an answer without tokens")
        return start, end

    def _is_blank(self, ids: Sequence[int]) -> bool:
        if not ids:
            return True
        # Almost always the one line break after the end of turn.
        key = tuple(ids[:8])
        if len(ids) > len(key):
            return not self.chat.decode(ids).strip()
        if key not in self._blank:
            self._blank[key] = not self.chat.decode(ids).strip()
        return self._blank[key]


def answer_indices(messages: Sequence[Message]) -> list[int]:
    """Places of the assistant messages that answer somebody; one before any user or tool message is only context.

    Raises :class:`Unusable` when there are none or one is empty.
    """
    answers, asked = [], False
    for index, message in enumerate(messages):
        asked = asked or message["role"] in ("user", "tool")
        if asked and message["role"] == "assistant":
            if not (message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content")):
                raise Unusable("empty_answer", f"message {index + 1}")
            answers.append(index)
    if not answers:
        raise Unusable("no_answer")
    return answers


def _restore_reasoning(prompt: str, closed: str, reasoning: str | None) -> str:
    """Put reasoning that the template dropped back behind the prompt that opens it: `<think>` reasoning `</think>` answer."""
    opened = _OPENED_REASONING.search(prompt)
    if opened is None:
        raise Unusable("not_aligned", "the rendered answer does not begin with its prompt")
    if not reasoning:
        raise Unusable("reasoning_missing")
    head = prompt[: opened.start()]
    if not closed.startswith(head):
        raise Unusable("not_aligned", "the rendered answer does not begin with its prompt")
    rest = closed[len(prompt if closed.startswith(prompt) else head) :]
    if block := _REASONING_BLOCK.match(rest):
        rest = rest[block.end(1) :]
    if rest.lstrip().startswith(_CLOSE_REASONING):
        return prompt + reasoning + rest
    # The block is laid out as it was opened: each mark on a line of its own, or none.
    line = opened.group(1)
    return f"{prompt}{reasoning.strip() if line else reasoning}{line}{_CLOSE_REASONING}{line}{line}{rest}"


def _cut(ids: list[int], spans: list[Span], straddled: int = 0) -> MaskedRow:
    # What follows the last answer teaches nothing and would have to be computed and stored.
    return MaskedRow(ids[: spans[-1][1]], spans, straddled)


def _find(ids: list[int], wanted: tuple[int, ...], start: int) -> int:
    """First place of ``wanted`` in ``ids`` at or behind ``start``; -1 if there is none."""
    while True:
        try:
            start = ids.index(wanted[0], start)
        except ValueError:
            return -1
        if tuple(ids[start : start + len(wanted)]) == wanted:
            return start
        start += 1
