"""A small sample of rows with the messages that they were made of, for the comparison with what a server would be sent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from draftsmith.conversations import Conversation, Message
from draftsmith.tokenize.lengths import TokenRow
from draftsmith.tokenize.masking import answer_indices

COUNT = 20
"""Rows of a sample."""

# Of each kind of conversation in a source this many are remembered, the first ones.
_OF_A_KIND = 8
# Where rows name ever new sources, not more than this many kinds are remembered.
_KINDS = 128
# Longer ones are told apart as well by a shorter one.
_LONGEST = 20_000


class ServedSample:
    """Remembers conversations spread over sources and over what templates treat differently."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, tuple[bool, ...]], list[dict[str, Any]]] = {}

    def add(self, conversation: Conversation, rows: Sequence[TokenRow], identities: Sequence[str]) -> None:
        """Consider a conversation with its rows; ``identities`` are theirs."""
        messages = conversation.messages
        kind = (conversation.source, _kind(conversation))
        kept = self._kinds.get(kind)
        if kept is None:
            if len(self._kinds) >= _KINDS:
                return
            kept = self._kinds[kind] = []
        if len(kept) >= _OF_A_KIND or sum(len(message["content"]) for message in messages) > _LONGEST:
            return
        answers = answer_indices(messages)
        # With rows left out it is not known which answer is whose; then the rendering is compared alone.
        row: dict[str, Any] = {}
        last = answers[-1]
        if len(rows) == 1:
            last = answers[len(rows[0].spans) - 1]
        if len(rows) in (1, len(answers)):
            row = {"row_id": identities[-1], "prompt_tokens": int(rows[-1].spans[-1][0])}
        kept.append({
            "conversation_id": conversation.conversation_id,
            "source": conversation.source,
            "where": conversation.where,
            "messages": messages[:last],
            **({"tools": conversation.tools} if conversation.tools else {}),
            **row,
        })  # fmt: skip

    def chosen(self) -> list[dict[str, Any]]:
        """The sample: each source in turn, and of each what is rarest to be treated alike first."""
        of_source: defaultdict[str, list[list[dict[str, Any]]]] = defaultdict(list)
        for (source, _), kept in sorted(self._kinds.items(), key=lambda item: (-sum(item[0][1]), item[0])):
            of_source[source].append(kept)
        # Of every kind the first one, then of every kind the second.
        queues = [[one for tier in zip_longest(*kinds) for one in tier if one] for kinds in of_source.values()]
        return [one for tier in zip_longest(*queues) for one in tier if one][:COUNT]


def _kind(conversation: Conversation) -> tuple[bool, ...]:
    messages: list[Message] = conversation.messages
    roles = [message["role"] for message in messages]
    return (
        bool(conversation.tools),
        any("tool_calls" in message for message in messages),
        any("reasoning_content" in message for message in messages),
        "system" in roles,
        "developer" in roles,
        roles.count("user") > 1,
        any("name" in message for message in messages),
    )
