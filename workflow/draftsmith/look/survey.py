"""Everything about the rows that can be told without their tokens, in one pass, and which rows to show."""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.conversations import splits
from draftsmith.errors import DraftsmithError

_COLUMNS = ("row_id", "source", "domain", "split", "length", "supervised", "span_starts", "span_ends")
_OPTIONAL = ("repeats", "cut")
_BATCH_ROWS = 8192
# Rows of each kind that are shown, and of how many domains and sources, the largest, one each.
_EACH = 3
_RANDOM = 6
_DOMAINS, _SOURCES = 12, 8
# Rows whose prompts' languages are looked at.
_TEXTS = 2000


@dataclass
class _First:
    """The ``size`` rows of the smallest keys."""

    size: int
    best: list[tuple[Any, int]] = field(default_factory=list)

    def offer(self, key: Any, place: int) -> None:
        if len(self.best) < self.size or key < self.best[-1][0]:
            insort(self.best, (key, place))
            del self.best[self.size :]


@dataclass
class Survey:
    """Counts by split and domain, and the places (numbers of rows in the file) of the rows to show and to read.

    ``chosen`` names for each place why; ``read`` are training rows that are taken as a sample of all. Keys of ``answers``,
    the lengths of supervised spans, are powers of two, the upper ends of their ranges; those of ``shares`` tenths, rounded
    up, with 0 for no and 11 for every token supervised. In ``domains`` a row counts as often as a pass of training takes it.
    """

    rows: Counter[str] = field(default_factory=Counter)
    domains: dict[str, dict[str, Counter[str]]] = field(default_factory=dict)
    answers: dict[str, Counter[int]] = field(default_factory=dict)
    shares: dict[str, Counter[int]] = field(default_factory=dict)
    chosen: dict[int, list[str]] = field(default_factory=dict)
    read: set[int] = field(default_factory=set)

    def count(self, row: dict[str, Any]) -> None:
        """Take one row into the counts."""
        split, length, supervised = row["split"], row["length"], row["supervised"]
        self.rows[split] += 1
        self.domains.setdefault(row["domain"], {}).setdefault(split, Counter()).update(
            rows=row.get("repeats", 1), tokens=length, supervised=supervised
        )
        answers = self.answers.setdefault(split, Counter())
        for start, end in zip(row["span_starts"], row["span_ends"], strict=True):
            answers[1 << max(end - start - 1, 0).bit_length()] += 1
        tenth = 11 if supervised >= length > 0 else -(-10 * supervised // length) if length else 0
        self.shares.setdefault(split, Counter())[tenth] += 1

    def figures(self) -> dict[str, Any]:
        """The counts as they are written to look.json."""
        return {
            "rows": dict(self.rows),
            "by_domain": {
                name: {split: dict(counts) for split, counts in found.items()}
                for name, found in sorted(self.domains.items())
            },
            "answer_lengths": {split: sorted(map(list, found.items())) for split, found in self.answers.items()},
            "supervised_shares": {split: sorted(map(list, found.items())) for split, found in self.shares.items()},
        }


def survey(rows: Path, seed: int) -> Survey:
    """Count the rows and choose which to show: the ends of every measure, one of each domain and source, and random ones.

    The choice hangs on the seed and on what the rows hold, not on their order. Memory grows with the number of domains
    and sources alone. Raises :class:`DraftsmithError` when ``rows`` cannot be read or holds no row.
    """
    made = Survey()
    kinds = {
        "at random": _First(_RANDOM),
        "longest": _First(_EACH),
        "shortest": _First(_EACH),
        "largest share supervised": _First(_EACH),
        "smallest share supervised": _First(_EACH),
        "most answers": _First(1),
        "cut": _First(1),
        "held out for validation": _First(2),
    }
    domains: dict[str, _First] = {}
    sources: dict[str, _First] = {}
    by_source: Counter[str] = Counter()
    texts: list[tuple[float, int]] = []
    for place, row in enumerate(_read(rows)):
        made.count(row)
        drawn = splits.share(seed, "look", row["row_id"])
        length = row["length"]
        portion = row["supervised"] / length if length else 0.0
        by_source[row["source"]] += 1
        for name, key in (
            ("longest", -length),
            ("shortest", length),
            ("largest share supervised", -portion),
            ("smallest share supervised", portion),
            ("most answers", -len(row["span_starts"])),
            ("at random", 0),
        ):
            kinds[name].offer((key, drawn), place)
        if row.get("cut"):
            kinds["cut"].offer(drawn, place)
        if row["split"] == "train":
            # Kept are the smallest, and a heap gives up its smallest first: hence the sign.
            (heapq.heappush if len(texts) < _TEXTS else heapq.heappushpop)(texts, (-drawn, place))
        else:
            kinds["held out for validation"].offer(drawn, place)
        domains.setdefault(row["domain"], _First(1)).offer(drawn, place)
        sources.setdefault(row["source"], _First(1)).offer(drawn, place)
    if not made.rows:
        raise DraftsmithError(f"{rows}: holds no rows; run the stage tokenize again")
    sizes = {name: sum(counts["rows"] for counts in found.values()) for name, found in made.domains.items()}
    kinds |= {f"domain {name}": domains[name] for name in _largest(sizes, _DOMAINS)}
    kinds |= {f"source {name}": sources[name] for name in _largest(by_source, _SOURCES)}
    for why, first in kinds.items():
        for _, place in first.best:
            made.chosen.setdefault(place, []).append(why)
    made.read = {place for _, place in texts}
    return made


def _largest(sizes: dict[str, int] | Counter[str], most: int) -> list[str]:
    return sorted(sizes, key=lambda name: (-sizes[name], name))[:most]


def _read(rows: Path) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(rows) as opened:
            present = opened.schema_arrow.names
            if missing := [name for name in _COLUMNS if name not in present]:
                raise DraftsmithError(f"{rows}: has no column {missing[0]}; run the stage tokenize again")
            columns = [name for name in (*_COLUMNS, *_OPTIONAL) if name in present]
            for batch in opened.iter_batches(_BATCH_ROWS, columns=columns):
                yield from batch.to_pylist()
    except FileNotFoundError:
        raise DraftsmithError(f"{rows}: no such file; run the stage tokenize first") from None
    except pa.ArrowInvalid as error:
        raise DraftsmithError(f"{rows}: cannot be read as rows ({error}); run the stage tokenize again") from None
