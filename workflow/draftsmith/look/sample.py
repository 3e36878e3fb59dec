"""The rows that are shown, token by token, and the texts of prompts whose languages are told."""

from __future__ import annotations

import heapq
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.conversations import splits
from draftsmith.errors import DraftsmithError
from draftsmith.look.pieces import Speller, parts
from draftsmith.look.survey import Survey

_BATCH_ROWS = 256
_TEXTS = 2000
# Tokens of a prompt that are enough to tell its language.
_TOKENS = 512
_NAME_CHARACTERS = 200
# Spans whose borders are told in words.
_SPANS = 8


@dataclass
class Taken:
    """Rows as look.json has them, in the order in which they are shown, and the prompts' texts of a sample."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


@dataclass
class Asked:
    """The evaluation's prompts: how many of each domain, and the texts of a sample."""

    by_domain: dict[str, int]
    texts: list[str]


def take(rows: Path, surveyed: Survey, speller: Speller) -> Taken:
    """Read the rows that were chosen; no more than a few hundred are in memory at once."""
    import pyarrow.parquet as pq

    made = Taken()
    found: dict[int, dict[str, Any]] = {}
    begin = 0
    with pq.ParquetFile(rows) as opened:
        for batch in opened.iter_batches(_BATCH_ROWS):
            here = range(begin, begin + batch.num_rows)
            begin += batch.num_rows
            for place in here:
                if place not in surveyed.chosen and place not in surveyed.read:
                    continue
                row = batch.slice(place - here.start, 1).to_pylist()[0]
                spans = list(zip(row["span_starts"], row["span_ends"], strict=True))
                if place in surveyed.chosen:
                    found[place] = _shown(row, spans, surveyed.chosen[place], speller)
                if place in surveyed.read and not speller.problem:
                    made.texts.append(_prompt(row["input_ids"], spans, speller))
    # As they were chosen, so that the longest come first.
    made.rows = [found[place] for place in surveyed.chosen]
    return made


def _shown(row: dict[str, Any], spans: list[tuple[int, int]], why: list[str], speller: Speller) -> dict[str, Any]:
    names = {key: row[key][:_NAME_CHARACTERS] for key in ("row_id", "conversation_id", "source", "domain", "split")}
    return names | {
        "why": [reason[:_NAME_CHARACTERS] for reason in why],
        "length": row["length"],
        "supervised": row["supervised"],
        "cut": bool(row.get("cut")),
        "spans": len(spans),
        "first_spans": [list(span) for span in spans[:_SPANS]],
        "parts": parts(row["input_ids"], spans, speller),
    }


def _prompt(ids: list[int], spans: list[tuple[int, int]], speller: Speller) -> str:
    """The text of the first tokens that are not supervised, a line for each stretch between special tokens."""
    borders = [0, *(border for span in spans for border in span)]
    lines: list[str] = []
    left = _TOKENS
    # What follows the last answer belongs to no prompt; without any, all is one.
    for start, end in zip(borders[::2], borders[1::2] or [len(ids)], strict=False):
        stretch: list[int] = []
        for token in [*ids[start : min(end, start + left)], None]:
            if token is not None and token not in speller.special:
                stretch.append(token)
                continue
            lines.append(speller.decode(stretch).strip() if stretch else "")
            stretch = []
        left = max(left - (end - start), 0)
    return "\n".join(line for line in lines if line)


def prompts(path: Path, seed: int) -> Asked:
    """Count the evaluation's prompts and take what their users say.

    Raises :class:`DraftsmithError` for a file that is not there or a line that is no prompt.
    """
    by_domain: Counter[str] = Counter()
    drawn: list[tuple[float, int, str]] = []
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    prompt = json.loads(line)
                    text = "\n".join(
                        message["content"]
                        for message in prompt["messages"]
                        if message["role"] not in ("assistant", "system")
                    )
                    by_domain[prompt["domain"]] += 1
                    entry = (-splits.share(seed, "look", prompt["prompt_id"]), number, text)
                except (ValueError, KeyError, TypeError) as error:
                    raise DraftsmithError(
                        f"{path}, line {number}: no prompt ({type(error).__name__}: {error}); run the stage tokenize again"
                    ) from None
                (heapq.heappush if len(drawn) < _TEXTS else heapq.heappushpop)(drawn, entry)
    except FileNotFoundError:
        raise DraftsmithError(f"{path}: no such file; run the stage tokenize first") from None
    return Asked(dict(by_domain), [text for _, _, text in drawn])
