"""What is left out, for which reason: one code a reason, counted, each with its first example."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from draftsmith.errors import DraftsmithError
from draftsmith.log import log

NOT_SAMPLED = "not_sampled"
"""Reason code of what a source's `weight` below 1 leaves out; it is as if those conversations were not there."""


class Unusable(Exception):
    """A conversation that is left out: ``reason`` is a code, ``detail`` what was found."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True, slots=True)
class Dropped:
    """A row that is no usable conversation, with where it lies and the place of its source in ``data.sources``."""

    where: str
    reason: str
    detail: str
    source_index: int = 0


@dataclass
class DropCount:
    """How many conversations were left out for which reason, each with its first example.

    ``by_source`` has the same counts for each place in ``data.sources`` that was given.
    """

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    by_source: defaultdict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def add(self, where: str, reason: str, detail: str = "", source: int | None = None) -> None:
        """Count one conversation, ``where`` with its file and line, of the ``source`` at this place in ``data.sources``."""
        self.counts[reason] += 1
        if source is not None:
            self.by_source[source][reason] += 1
        self.examples.setdefault(reason, f"{where}: {detail}" if detail else where)

    def check(self, total: int, allowed: float, harmless: Sequence[str] = ()) -> None:
        """Raise :class:`DraftsmithError` when more than the share ``allowed`` of ``total`` cannot be used.

        Reasons in ``harmless`` do not count, since nothing is wrong with those conversations; what was not sampled is no
        part of the total either.
        """
        harmless = (*harmless, NOT_SAMPLED)
        total -= self.counts[NOT_SAMPLED]
        unusable = sum(count for reason, count in self.counts.items() if reason not in harmless)
        if total and unusable > allowed * total:
            listed = "; ".join(
                f"{reason} {count} (first: {self.examples[reason]})"
                for reason, count in self.counts.most_common()
                if reason not in harmless
            )
            answered = ", set regenerate.enabled: true to have answers written," if self.counts["no_answer"] else ""
            raise DraftsmithError(
                f"{unusable} of {total} conversations cannot be used, more than data.max_dropped_fraction ({allowed:g}) "
                f"allows: {listed}; mend the data{answered} or raise the limit"
            )

    def report(self, stage: str) -> None:
        """Log one line a reason."""
        for reason, count in self.counts.most_common():
            log(f"{stage}: left out {count} conversations: {reason} (first: {self.examples[reason]})")
