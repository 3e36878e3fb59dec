"""All conversations of the sources, one after the other, with what each source gave.

A source's weight says how often a pass of training takes each of its conversations. Below 1 it is the share that is kept:
a seeded hash of what is asked decides, so that other rows that come or go change nothing, and neither does a
regeneration of the answers. Above 1 the rows are not copied (they would be extracted once in any case); the whole part
is how often training takes each, and the rest the share that it takes once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from draftsmith.config import Data, Source
from draftsmith.conversations import KNOWN_KEYS, Conversation, hub, normalise
from draftsmith.conversations.dropped import NOT_SAMPLED, Dropped, Unusable
from draftsmith.conversations.sources import RawRow, aside_mend, default_domain, read_source
from draftsmith.conversations.splits import share
from draftsmith.conversations.tokenised import Tokenised
from draftsmith.errors import DraftsmithError

Given = Conversation | Tokenised
"""A usable conversation, in messages or in tokens."""


@dataclass
class SourceFigures:
    """What one source gave: ``read`` rows, ``not_sampled`` of them left out by its weight, ``unusable`` out of shape."""

    path: str
    revision: str | None
    weight: float
    read: int = 0
    not_sampled: int = 0
    unusable: int = 0

    def as_json(self) -> dict[str, Any]:
        """The figures by name."""
        return asdict(self)


class Reader:
    """Reads the sources of ``data`` in order; ``figures`` has one entry a source that was begun."""

    def __init__(self, data: Data) -> None:
        self._data = data
        self._commits: dict[int, str] = {}
        self.figures: list[SourceFigures] = []

    def again(self) -> Reader:
        """Another reader of the same, which loads the same commits."""
        other = Reader(self._data)
        other._commits = self._commits
        return other

    def __iter__(self) -> Iterator[Given | Dropped]:
        """All conversations, and what is none.

        Raises :class:`DraftsmithError` at the end of a file in which no row has any messages.
        """
        self.figures.clear()
        for index, source in enumerate(self._data.sources):
            yield from self._read(index, source)

    def _read(self, index: int, source: Source) -> Iterator[Given | Dropped]:
        if source.path.startswith(hub.PREFIX):
            if index not in self._commits:
                self._commits[index] = hub.commit(source, f"data.sources[{index}]")
            source = source.model_copy(update={"revision": self._commits[index]})
        figures = SourceFigures(source.path, source.revision, source.weight)
        self.figures.append(figures)
        domain = source.domain or default_domain(source)
        file, seen, empty, first = None, 0, 0, None
        for raw in read_source(source, index):
            if raw.file != file:
                _check_not_empty(file, seen, empty, first, source)
                file, seen, empty, first = raw.file, 0, 0, raw
            seen += 1
            figures.read += 1
            given = self._shaped(raw, source, domain, index)
            if isinstance(given, Dropped):
                empty += given.reason in ("no_messages", "malformed_line")
                figures.not_sampled += given.reason == NOT_SAMPLED
                figures.unusable += given.reason != NOT_SAMPLED
            yield given
        _check_not_empty(file, seen, empty, first, source)
        if not figures.read:
            raise DraftsmithError(
                f"{source.path}: holds no conversations; data.sources[{index}] needs rows with {KNOWN_KEYS}"
            )

    def _shaped(self, raw: RawRow, source: Source, domain: str, index: int) -> Given | Dropped:
        where = raw.where
        try:
            given = normalise(raw, source.path, domain)
        except Unusable as unusable:
            # Of these too only a share counts, or they would weigh more against the others.
            if source.weight < 1 and not times(source.weight, self._data.seed, where):
                return Dropped(where, NOT_SAMPLED, "", index)
            return Dropped(where, unusable.reason, unusable.detail, index)
        if source.weight == 1:
            return replace(given, source_index=index) if index else given
        repeats = times(source.weight, self._data.seed, given.prompt_key())
        if not repeats:
            return Dropped(where, NOT_SAMPLED, "", index)
        return replace(given, source_index=index, repeats=repeats * given.repeats)


def times(weight: float, seed: int, key: str) -> int:
    """How often a pass takes what ``key`` names: the whole part of ``weight``, and once more for its rest of all keys."""
    whole = int(weight)
    return whole + (share(seed, "weight", key) < weight - whole)


def _check_not_empty(file: str | None, seen: int, empty: int, first: RawRow | None, source: Source) -> None:
    if file is None or first is None or seen != empty:
        return
    if first.fault:
        mend = "; save the file as UTF-8" if first.fault.startswith("not valid UTF-8") else ""
        raise DraftsmithError(
            f"{file}: holds no conversations; {first.place} is {first.fault}{mend}{aside_mend(source)}"
        )
    found = ", ".join(map(str, first.value)) if isinstance(first.value, Mapping) else f"a {type(first.value).__name__}"
    raise DraftsmithError(
        f"{file}: holds no conversations; its rows need {KNOWN_KEYS}, and the first has {found or 'no keys'}"
        f"{aside_mend(source)}"
    )
