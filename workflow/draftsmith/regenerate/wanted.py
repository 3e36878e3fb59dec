"""Which conversations are asked."""

from __future__ import annotations

from collections.abc import Iterator

from draftsmith.config import Data
from draftsmith.conversations import Conversation
from draftsmith.conversations.dropped import NOT_SAMPLED, DropCount, Dropped
from draftsmith.conversations.reading import Reader, SourceFigures
from draftsmith.regenerate import talks


def shard_of(conversation: Conversation, count: int) -> int:
    """Which of ``count`` shards asks it, from 0: told by the question alone, so that more data moves no conversation."""
    return int(conversation.prompt_key()[:15], 16) % count


class Questions:
    """Reads what can be asked; the rest is counted. Asking the same twice would teach nothing.

    ``total`` is how many conversations the sources have, ``dropped`` counts those that cannot be used; ``sources`` has what
    each source gave, once it is read.
    """

    def __init__(self) -> None:
        self.total = 0
        self.dropped = DropCount()
        self.sources: list[SourceFigures] = []

    def most_failed(self, fraction: float) -> float:
        """How many conversations make the share ``fraction`` of those that count."""
        return fraction * (self.total - self.dropped.counts[NOT_SAMPLED])

    def read(self, data: Data) -> Iterator[Conversation]:
        """The conversations of the sources, in order."""
        seen = set()
        reader = Reader(data)
        self.sources = reader.figures
        for given in reader:
            self.total += 1
            if isinstance(given, Dropped):
                self.dropped.add(given.where, given.reason, given.detail)
                continue
            if not isinstance(given, Conversation) or not talks.parts(given.messages):
                self.dropped.add(given.where, "no_question")
            elif (key := given.prompt_key()) in seen:
                self.dropped.add(given.where, "duplicate")
            else:
                seen.add(key)
                yield given
