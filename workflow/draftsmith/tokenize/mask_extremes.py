"""Sources and domains of which nothing or everything is supervised: a mistaken template, wrong roles, a wrong mask.

In a mixture such a source hides behind the others, whose rows are right. One that gives nothing, or nothing but supervised
tokens, fails the stage: nobody names a source to have none of it. Of domains, and of single rows without a prompt, there is
a warning, as there may be a reason for them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from draftsmith.errors import DraftsmithError
from draftsmith.log import log


@dataclass
class _Group:
    rows: int = 0
    tokens: int = 0
    supervised: int = 0
    whole_rows: int = 0
    example: str = ""
    lost: Counter[str] = field(default_factory=Counter)
    lost_examples: dict[str, str] = field(default_factory=dict)

    def nothing(self) -> str | None:
        """What was lost, if that is all that there was."""
        if self.supervised or not self.lost:
            return None
        return "; ".join(
            f"{reason} {count} (first: {self.lost_examples[reason]})" for reason, count in self.lost.most_common()
        )

    @property
    def everything(self) -> bool:
        return self.rows > 0 and self.supervised == self.tokens


class MaskExtremes:
    """Counts by source (its place in ``data.sources``) and by domain."""

    def __init__(self) -> None:
        self._sources: defaultdict[int, _Group] = defaultdict(_Group)
        self._domains: defaultdict[str, _Group] = defaultdict(_Group)

    def add(self, source: int, domain: str, name: str, tokens: int, supervised: int) -> None:
        """Count a row of the conversation ``name``."""
        for group in (self._sources[source], self._domains[domain]):
            group.rows += 1
            group.tokens += tokens
            group.supervised += supervised
            if tokens == supervised:
                group.whole_rows += 1
                group.example = group.example or name

    def lose(self, source: int, domain: str | None, name: str, reason: str) -> None:
        """Count a conversation that gave no row; ``domain`` is None where that is not known."""
        for group in (self._sources[source], *([] if domain is None else [self._domains[domain]])):
            group.lost[reason] += 1
            group.lost_examples.setdefault(reason, name)

    @property
    def whole_rows(self) -> int:
        """Rows of which every token is supervised."""
        return sum(group.whole_rows for group in self._sources.values())

    def check(self, paths: Sequence[str]) -> None:
        """Warn of domains and rows; raise :class:`DraftsmithError` for sources. ``paths`` are those of ``data.sources``."""
        for domain, group in sorted(self._domains.items()):
            if lost := group.nothing():
                log(f"tokenize: warning: nothing of the domain {domain} is supervised: {lost}")
            if group.everything:
                log(f"tokenize: warning: every token of the domain {domain} is supervised (first: {group.example})")
        for index, group in sorted(self._sources.items()):
            if lost := group.nothing():
                raise DraftsmithError(
                    f"{paths[index]}: none of its {group.lost.total()} conversations can be learnt from: {lost}; mend its "
                    f"roles, its masks or the chat template, or take data.sources[{index}] out"
                )
            if group.everything:
                raise DraftsmithError(
                    f"{paths[index]}: every token of its {group.rows} rows is supervised, prompts and headers too (first: "
                    f"{group.example}); mend its loss_mask, or where it has messages tokenize.mask"
                )
            if group.whole_rows:
                log(
                    f"tokenize: warning: {group.whole_rows} of {group.rows} rows of {paths[index]} are supervised as a whole, "
                    f"without a prompt (first: {group.example})"
                )
