"""Which conversations train, which validate, and which are kept for the served draft to answer.

The choice rests on a seeded hash of what was asked, not of the answers and not of the order: other rows that come or go
leave it as it is, and so does a regeneration of the answers. Conversations that ask the same stay together.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

# Of a small domain at most this share is kept for evaluation, so that something remains to train on.
_EVALUATION_SHARE = 1 / 3


@dataclass(slots=True)
class Group:
    """Conversations that ask the same: domain of the first, whether one may be an evaluation prompt, a wished split.

    ``source`` is the place in ``data.sources`` of the first, ``elsewhere`` counts those of other sources.
    """

    domain: str
    eligible: bool = False
    wished: str | None = None
    conversations: int = 0
    rows: int = 0
    source: int = 0
    # None where there are none, which is nearly always: there may be millions of groups.
    elsewhere: Counter[int] | None = None

    def count(self, source: int, rows: int, sign: int = 1) -> None:
        """Add a conversation with its number of ``rows``; with ``sign`` -1 take it away again."""
        self.conversations += sign
        self.rows += sign * rows
        if source != self.source:
            self.elsewhere = self.elsewhere or Counter()
            self.elsewhere[source] += sign

    def by_source(self) -> Counter[int]:
        """How many conversations each source gave."""
        others = self.elsewhere or Counter()
        return Counter({self.source: self.conversations - others.total()}) + others


def assign(groups: Mapping[str, Group], *, per_domain: int, fraction: float, seed: int) -> dict[str, str]:
    """The split ('train', 'validation' or 'evaluation') of each group that has rows or an evaluation prompt.

    Wishes are kept. Of each domain ``per_domain`` groups are evaluated (no more than a third of it), then of the others
    a share of ``fraction`` validates. With two or more groups left and ``fraction`` above 0 there is at least one of
    each.
    """
    splits = {key: group.wished for key, group in groups.items() if group.wished}
    domains: dict[str, list[str]] = defaultdict(list)
    for key, group in groups.items():
        # What gave no row and cannot be asked is no part of the domain.
        if group.rows or group.eligible or group.wished:
            domains[group.domain].append(key)
    for keys in domains.values():
        wanted = min(per_domain, int(len(keys) * _EVALUATION_SHARE)) - sum(
            splits.get(key) == "evaluation" for key in keys
        )
        free = sorted(
            (key for key in keys if groups[key].eligible and key not in splits),
            key=lambda key: share(seed, "evaluation", key),
        )
        splits.update(dict.fromkeys(free[: max(wanted, 0)], "evaluation"))
    rest = [key for key, group in groups.items() if key not in splits and group.rows]
    order = sorted(rest, key=lambda key: share(seed, "validation", key))
    count = sum(share(seed, "validation", key) < fraction for key in rest)
    if fraction > 0 and order:
        trains, validates = ("train" in splits.values(), "validation" in splits.values())
        least = 0 if validates or (len(order) == 1 and not trains) else 1
        most = len(order) if trains else len(order) - 1
        count = min(max(count, least), most)
    splits.update({key: "validation" if place < count else "train" for place, key in enumerate(order)})
    return {key: split for key, split in splits.items() if split}


def share(seed: int, purpose: str, key: str) -> float:
    """A number in [0, 1) that looks random and is the same for the same arguments on every machine."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{key}".encode()).digest()
    # 53 bits, what a float holds exactly: with 64, the largest would be rounded up to 1.
    return (int.from_bytes(digest[:8], "big") >> 11) / (1 << 53)
