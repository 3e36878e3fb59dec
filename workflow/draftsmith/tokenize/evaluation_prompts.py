"""Conversations that are kept to be asked in the evaluation, and the prompts that are written of them."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftsmith.config import Tokenize
from draftsmith.conversations import Message, splits
from draftsmith.conversations.dropped import Unusable
from draftsmith.conversations.reading import Given
from draftsmith.conversations.tokenised import Tokenised
from draftsmith.files import atomic_path
from draftsmith.tokenize import masking

REASONS = {
    "prompt_too_long": "it is kept for evaluation, and its prompt is longer than tokenize.max_length",
    "nothing_asked": "it is kept for evaluation, and nothing comes before its last answer",
}
"""Reason codes of :meth:`Candidates.write` with what each means."""


class Candidates:
    """Conversations that may be asked, by their prompt key: those that wish it, and of each domain the first by hash.

    Args:
        settings: those of the stage.
        groups: the split's, by prompt key; a group is made eligible when one of its conversations becomes a candidate.
    """

    def __init__(self, settings: Tokenize, groups: Mapping[str, splits.Group]) -> None:
        self._settings, self._groups = settings, groups
        self._by_key: dict[str, Given] = {}
        self._queues: dict[str, list[tuple[float, str]]] = {}

    def get(self, key: str) -> Given | None:
        """The candidate that asks what ``key`` names."""
        return self._by_key.get(key)

    def consider(self, key: str, given: Given, length: int) -> None:
        """Remember a conversation, whose prompt has ``length`` tokens, if nobody asks the same and it is among the first."""
        if key in self._by_key:
            return
        if given.split == "evaluation":
            self._by_key[key] = given
            return
        group, wanted = self._groups[key], self._settings.evaluation_per_domain
        if group.wished or not wanted or length > self._settings.max_length:
            return
        queue = self._queues.setdefault(group.domain, [])
        self._by_key[key], group.eligible = given, True
        heapq.heappush(queue, (-splits.share(self._settings.seed, "evaluation", key), key))
        # A few more than are needed, as some may turn out to have a split of their own.
        if len(queue) > 4 * wanted:
            _, last = heapq.heappop(queue)
            if not self._groups[last].wished:
                self._groups[last].eligible = False
                del self._by_key[last]

    def forget(self, key: str, content_key: str) -> None:
        """Ask the conversation with this content no more, if it is the candidate of ``key``."""
        given = self._by_key.get(key)
        if given is not None and given.content_key() == content_key:
            del self._by_key[key]
            self._groups[key].eligible = False

    def write(
        self, chosen: Mapping[str, str], masker: masking.Masker, prompts: Path
    ) -> Iterator[tuple[Given, Unusable | None]]:
        """Write the prompts of the candidates whose split is 'evaluation', ordered by domain and key, one JSON object a line.

        Yields each candidate, with the reason (one of :data:`REASONS` or of tokenize/masking.py) if it is left out; the file is
        there when all have been yielded.
        """
        lines = []
        for key in sorted(key for key, split in chosen.items() if split == "evaluation" and key in self._by_key):
            given = self._by_key[key]
            try:
                prompt = self._prompt(given, masker)
            except Unusable as unusable:
                yield given, unusable
                continue
            named = {"prompt_id": key, "conversation_id": given.conversation_id, "domain": given.domain}
            lines.append(named | prompt)
            yield given, None
        lines.sort(key=lambda line: (str(line["domain"]), str(line["prompt_id"])))
        with atomic_path(prompts) as temporary:
            temporary.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))

    def _prompt(self, given: Given, masker: masking.Masker) -> dict[str, Any]:
        asked: dict[str, Any] = {}
        if isinstance(given, Tokenised):
            ids = given.prompt_ids()
        else:
            asked["messages"] = _asked(given.messages)
            ids = masker.prompt_ids(asked["messages"], given.tools)
            if given.tools:
                asked["tools"] = given.tools
        if not ids:
            raise Unusable("nothing_asked")
        if len(ids) > self._settings.max_length:
            raise Unusable("prompt_too_long", f"{len(ids)} tokens")
        return asked | {"prompt_token_ids": ids}


def _asked(messages: Sequence[Message]) -> list[Message]:
    """What is asked: everything before the last answer, or all of it where nobody has answered yet."""
    try:
        return list(messages[: masking.answer_indices(messages)[-1]])
    except Unusable:
        if messages[-1]["role"] == "assistant":
            raise
        return list(messages)
