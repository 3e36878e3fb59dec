"""What tokenize.json says of the rows that were written and the prompts that were kept."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from draftsmith.conversations.dropped import NOT_SAMPLED
from draftsmith.conversations.reading import SourceFigures
from draftsmith.train_draft import plan

DUPLICATES = ("duplicate", "near_duplicate")
"""Reason codes of conversations that are in another one's place."""
SAME_PROMPT = ("evaluation_prompt", "split_conflict")
"""Reason codes of conversations that ask what one of another split asks."""

# Sizes of packs that are tried; those that no row of these data fits into are left out.
_PACKS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)


class RowFigures:
    """Counts rows and prompts as they are written."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.by_split: Counter[str] = Counter(train=0, validation=0, evaluation=0)
        self.by_domain: dict[str, Counter[str]] = {}
        self.by_source: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self.longest = 0
        self._histogram: Counter[int] = Counter()
        self._lengths, self._repeats = array("i"), array("i")
        self._last = -1

    def add_row(self, record: dict[str, Any], split: str) -> None:
        """Count a row, of the spool's columns, that goes to ``split``; rows of one conversation come together."""
        length, repeats = record["length"], record["repeats"]
        self.counts.update(rows=1, tokens=length, supervised=record["supervised"], truncated=int(record["cut"]))
        self.counts["tokens_saved"] += record["saved"]
        self.counts[f"{split}_tokens"] += length
        source = self.by_source[record["source_index"]]
        source.update(kept=int(record["number"] != self._last), rows=1, tokens=length)
        self._last = record["number"]
        self._split(record["domain"], split)
        # Powers of two: a row of 100 tokens counts under 128.
        self._histogram[1 << (length - 1).bit_length()] += 1
        self.longest = max(self.longest, length)
        if split == "train":
            self._lengths.append(length)
            self._repeats.append(repeats)
            self.counts.update(repeated_rows=repeats, repeated_tokens=repeats * length)

    def add_prompt(self, domain: str, source_index: int) -> None:
        """Count a prompt kept for evaluation."""
        self.by_source[source_index]["kept"] += 1
        self._split(domain, "evaluation")

    def _split(self, domain: str, split: str) -> None:
        self.by_split[split] += 1
        self.by_domain.setdefault(domain, Counter(train=0, validation=0, evaluation=0))[split] += 1

    def as_json(self) -> dict[str, Any]:
        """The figures by name."""
        return {
            **{name: self.counts[name] for name in ("rows", "tokens", "supervised", "truncated", "tokens_saved")},
            "tokens_by_split": {split: self.counts[f"{split}_tokens"] for split in ("train", "validation")},
            "by_split": dict(self.by_split),
            "by_domain": {domain: dict(counts) for domain, counts in sorted(self.by_domain.items())},
            "length_histogram": [[upper, count] for upper, count in sorted(self._histogram.items())],
            "packing": self.packing(),
        }

    def sources(self, read: list[SourceFigures], dropped: Mapping[int, Counter[str]]) -> list[dict[str, Any]]:
        """What became of each source; ``dropped`` counts by reason the conversations that were left out of it.

        ``read`` is the sum of ``kept``, ``unusable``, ``duplicates``, ``same_prompt`` and ``not_sampled``, conversations
        all; ``rows`` and ``tokens`` are those of the kept ones that train or validate.
        """
        made = []
        for place, figures in enumerate(read):
            lost = dropped.get(place, Counter())
            apart = {
                "duplicates": sum(lost[reason] for reason in DUPLICATES),
                "same_prompt": sum(lost[reason] for reason in SAME_PROMPT),
                "not_sampled": lost[NOT_SAMPLED],
            }
            apart["unusable"] = lost.total() - sum(apart.values())
            kept = {name: self.by_source[place][name] for name in ("kept", "rows", "tokens")}
            made.append(figures.as_json() | apart | kept)
        return made

    def packing(self) -> dict[str, Any]:
        """How full the packs of training would be, by several sizes, in its first pass with the seed 0.

        ``padding_if_padded`` is the share of padding that there would be if each row were filled up to the longest.
        """
        rows, tokens = self.counts["repeated_rows"], self.counts["repeated_tokens"]
        lengths, repeats = self._lengths.tolist(), self._repeats.tolist()
        longest = max(lengths, default=0)
        sizes = [size for size in _PACKS if size >= longest] or [1 << (longest - 1).bit_length()]
        return {
            "rows_per_pass": rows,
            "tokens_per_pass": tokens,
            "padding_if_padded": round(1 - tokens / (rows * longest), 4) if rows else 0.0,
            "by_pack_tokens": [
                plan.figures(lengths, plan.epoch_packs(lengths, size, 0, 0, repeats), size) for size in sizes
            ],
        }
