"""A sample of the conversations: how many there are, and what rows they give.

A large file of JSON lines is looked at in places spread over it, and its lines are counted by their mean length; of other
kinds the first rows are taken. Token counts come from the target's own tokenizer and template where its folder has a
tokenizer.json, else from the number of characters.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from draftsmith.config import Config, Source
from draftsmith.conversations import Conversation, hub, normalise
from draftsmith.conversations.dropped import Unusable
from draftsmith.conversations.sources import RawRow, default_domain, files, read_source
from draftsmith.conversations.tokenised import Tokenised
from draftsmith.errors import DraftsmithError
from draftsmith.estimate.counter import Counter, counter
from draftsmith.files import at_home

_ROWS = 256


@dataclass
class Sample:
    """What was looked at: for each usable conversation the ``lengths`` of its row and how many of its tokens are answers."""

    explained: str
    conversations: int = 0
    """All that there are, as the sample lets expect."""
    lengths: list[int] = field(default_factory=list)
    supervised: list[int] = field(default_factory=list)
    unusable: int = 0
    domains: int = 0
    repeats: float = 1.0
    """How often a pass of training takes a row, in the mean."""
    answers: int | None = None
    answer_tokens: int | None = None


def sample(config: Config, folder: Path | None, results: Path) -> Sample:
    """Look at the sources of ``config``; ``folder`` may hold the target's tokenizer.

    Raises :class:`DraftsmithError` for sources that cannot be looked at without a download.
    """
    tokens = counter(folder, config.tokenize.template_args)
    taken = Sample(explained="")
    domains: set[str] = set()
    weighted = answers = 0.0
    answer = _answer_tokens(config, results)
    for index, source in enumerate(config.data.sources):
        rows, count = _look(source, index)
        kept = count * min(1.0, source.weight)
        taken.conversations += round(kept)
        weighted += count * source.weight
        found = 0
        for raw in rows:
            try:
                given = normalise(raw, source.path, source.domain or default_domain(source))
            except Unusable:
                taken.unusable += 1
                continue
            domains.add(given.domain)
            asked = _take(taken, given, tokens, answer)
            found += asked
        answers += kept * found / max(1, len(rows))
    taken.domains = len(domains)
    taken.repeats = weighted / max(1, taken.conversations) if weighted > taken.conversations else 1.0
    if answer is not None:
        taken.answers, taken.answer_tokens = round(answers), round(answers * answer)
    taken.explained = (
        f"from {len(taken.lengths) + taken.unusable:,} of about {taken.conversations:,} conversations, {tokens.how}, one row a conversation"
        + (f"; answers of {answer:.0f} tokens, which the target is to write" if answer is not None else "")
    )
    return taken


def _answer_tokens(config: Config, results: Path) -> float | None:
    """Tokens of an answer that the target is to write: as an earlier regeneration had them, or the longest allowed."""
    if not config.regenerate.enabled:
        return None
    try:
        report = json.loads((results / "regenerate" / "regenerate.json").read_text())
        return float(report["answer_tokens"] / report["answers"])
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
        return float(config.regenerate.max_tokens)


def _take(taken: Sample, given: Conversation | Tokenised, tokens: Counter, answer: float | None) -> int:
    """Add a conversation; gives the number of answers that the target would write for it."""
    if isinstance(given, Tokenised):
        taken.lengths.append(len(given.ids))
        taken.supervised.append(sum(end - start for start, end in given.spans))
        return 0
    messages = given.messages
    questions = sum(message["role"] == "user" for message in messages)
    if answer is not None:
        messages = [message for message in messages if message["role"] != "assistant"]
    whole = tokens.conversation(messages)
    if answer is None:
        mine = sum(tokens.text(message["content"]) + 1 for message in messages if message["role"] == "assistant")
    else:
        mine = round(questions * answer)
        # The header of an answer, as of any message.
        whole += mine + questions * tokens.overhead
    if mine:
        taken.lengths.append(whole)
        taken.supervised.append(min(mine, whole))
    else:
        taken.unusable += 1
    return questions


def _look(source: Source, index: int) -> tuple[list[RawRow], int]:
    """Some rows of a source, and how many it has."""
    if source.path.startswith(hub.PREFIX):
        raise DraftsmithError(
            f"{source.path}: a data set of the hub is not looked at; give --rows and --row-tokens, or run tokenize first"
        )
    rows: list[RawRow] = []
    count = 0
    found_files = files(at_home(source.path), f"data.sources[{index}].path")
    each = max(8, _ROWS // len(found_files))
    for file in found_files:
        found, number = _of_file(file, source, index, each)
        rows += found
        count += number
    return rows, min(count, source.limit or count)


def _of_file(file: Path, source: Source, index: int, wanted: int) -> tuple[list[RawRow], int]:
    single = source.model_copy(update={"path": str(file), "limit": None})
    if file.name.endswith((".jsonl", ".ndjson")) and file.is_file():
        return _spread(file, wanted)
    first = list(islice(read_source(single, index), wanted + 1))
    if len(first) <= wanted:
        return first, len(first)
    return first[:wanted], _count(file, lambda: sum(1 for _ in read_source(single, index)))


def _count(file: Path, read: Callable[[], int]) -> int:
    """Rows of a file that is no plain JSON lines."""
    if file.name.endswith(".parquet"):
        import pyarrow.parquet as pq

        return int(pq.read_metadata(file).num_rows)
    if file.name.endswith(".gz"):
        # By the share of the compressed bytes that the first lines took.
        with open(file, "rb") as raw, gzip.open(raw) as lines:
            seen = sum(1 for _ in islice(lines, 20_000))
            return round(seen * file.stat().st_size / max(1, raw.tell())) if raw.tell() < file.stat().st_size else seen
    return read()


def _spread(file: Path, wanted: int) -> tuple[list[RawRow], int]:
    """Lines from places spread over a file; all of a small one."""
    size = file.stat().st_size
    if size < 4 << 20:
        lines = [line for line in file.read_bytes().splitlines() if line.strip()]
        step = max(1, len(lines) // wanted)
        return [row for line in lines[::step] if (row := _row(file, line))], len(lines)
    found, length, lines_seen = [], 0, 0
    with open(file, "rb") as opened:
        for place in range(wanted):
            opened.seek(size * place // wanted)
            if place:
                # The rest of a line that began before; whichever follows is as likely as any other.
                opened.readline()
            line = opened.readline()
            length, lines_seen = length + len(line), lines_seen + bool(line)
            if row := _row(file, line):
                found.append(row)
    return found, round(size * lines_seen / max(1, length))


def _row(file: Path, line: bytes) -> RawRow | None:
    try:
        return RawRow(str(file), "a line", json.loads(line))
    except ValueError:
        return None
