"""What a conversation becomes: rows, cut to length, or the reason why there are none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from draftsmith.chat import Chat, Encoded
from draftsmith.config import Tokenize
from draftsmith.conversations import Conversation
from draftsmith.conversations.dropped import Unusable
from draftsmith.conversations.reading import Given
from draftsmith.conversations.tokenised import Tokenised
from draftsmith.tokenize import lengths, masking, near_duplicates
from draftsmith.tokenize.lengths import TokenRow
from draftsmith.tokenize.marks import Marks

REASONS = {"token_out_of_range": "a token id is not in the model's vocabulary"}
"""Reason codes of :meth:`RowMaker.make` with what each means, besides those of tokenize/masking.py and tokenize/lengths.py."""


@dataclass
class Made:
    """What became of one conversation: rows, or the ``reason`` why there are none.

    ``lost`` counts rows that were left out beside others that stayed; ``prompt_tokens`` is the length of the prompt of
    the last answer; ``by_turn`` tells that each answer has a row of its own; ``straddled`` is as in
    :class:`draftsmith.tokenize.masking.MaskedRow`; ``special`` are the ids of special tokens that are supervised; ``signature`` is
    that of :mod:`draftsmith.tokenize.near_duplicates` where it is asked for.
    """

    rows: list[TokenRow] = field(default_factory=list)
    reason: str = ""
    detail: str = ""
    lost: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    by_turn: bool = False
    straddled: int = 0
    special: list[int] = field(default_factory=list)
    signature: bytes = b""


@dataclass(frozen=True)
class Plan:
    """All that a worker needs: target.json's content, the settings, and what was learnt from samples."""

    target: dict[str, Any]
    settings: Tokenize
    method: masking.Method
    marks: Marks


class Begun(NamedTuple):
    """Conversations of which rows are being made, what they were rendered to, and the texts to encode."""

    conversations: Sequence[Given]
    rendered: masking.Rendered
    texts: list[str]


class RowMaker:
    """Makes the rows of one conversation after the other."""

    def __init__(self, plan: Plan, chat: Chat | None = None) -> None:
        self._settings, self._vocabulary = plan.settings, plan.target["vocab_size"]
        self._chat = chat or Chat.load(plan.target, plan.settings.template_args)
        self._masker = masking.Masker(self._chat, plan.method, plan.marks, plan.target["fingerprint"])

    @property
    def fast(self) -> bool:
        """Whether most of the time goes to an encoder that leaves Python alone."""
        return self._chat.fast and self._chat.steady and self._masker.method != "generation_tags"

    def make_together(self, conversations: Sequence[Given]) -> list[Made]:
        """:meth:`make` of each; a few dozen together cost less than one by one."""
        begun = self.begin(conversations)
        return self.end(begun, self.encode(begun))

    def begin(self, conversations: Sequence[Given]) -> Begun:
        """The first of three steps of :meth:`make_together`."""
        rendered = self._masker.render([one for one in conversations if isinstance(one, Conversation)])
        return Begun(conversations, rendered, self._masker.to_encode(rendered))

    def encode(self, begun: Begun) -> dict[str, Encoded]:
        """The second step, which other threads may do: it leaves Python to this one. What fails, fails again in the third."""
        try:
            return self._chat.encode_many(begun.texts)
        except Exception:
            return {}

    def end(self, begun: Begun, encoded: dict[str, Encoded]) -> list[Made]:
        """The third step."""
        self._masker.have(begun.rendered, encoded)
        return [self.make(one) for one in begun.conversations]

    def make(self, conversation: Given) -> Made:
        """Rows that are cut to length and long enough, or the reason why there are none."""
        try:
            rows = self._rows(conversation)
        except Unusable as unusable:
            return Made(reason=unusable.reason, detail=unusable.detail)
        except Exception as error:
            error.add_note(f"while tokenising the conversation of {conversation.where}")
            raise
        made = Made(
            by_turn=len(rows) > 1,
            straddled=sum(row.straddled for row in rows),
            prompt_tokens=rows[-1].spans[-1][0],
        )
        failed: list[Unusable] = []
        for row in rows:
            try:
                made.rows.append(self._fitted(row))
            except Unusable as unusable:
                failed.append(unusable)
        if not made.rows:
            made.reason, made.detail = failed[0].reason, failed[0].detail
            return made
        made.lost.update(unusable.reason for unusable in failed)
        supervised = (row.ids[start:end] for row in made.rows for start, end in row.spans)
        made.special = sorted(set().union(*(self._chat.special.intersection(ids) for ids in supervised)))
        if self._settings.near_duplicates is not None:
            made.signature = near_duplicates.signature(conversation)
        return made

    def _rows(self, given: Given) -> list[masking.MaskedRow]:
        if isinstance(given, Tokenised):
            lengths.check_turns(len(given.spans), self._settings)
            return [masking.MaskedRow(given.ids.tolist(), given.spans)]
        lengths.check_turns(sum(message["role"] == "assistant" for message in given.messages), self._settings)
        return self._masker.rows(given)

    def _fitted(self, row: masking.MaskedRow) -> TokenRow:
        fitted = lengths.fit(row.ids, row.spans, self._settings)
        if (largest := max(fitted.ids)) >= self._vocabulary:
            raise Unusable("token_out_of_range", f"{largest} of {self._vocabulary}")
        return fitted
