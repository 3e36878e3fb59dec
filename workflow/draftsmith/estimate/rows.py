"""How many rows of how many tokens: read from rows.parquet where it is there, else estimated from the conversations."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

from draftsmith.config import Config
from draftsmith.errors import DraftsmithError
from draftsmith.estimate import model
from draftsmith.estimate.sample import Sample, sample
from draftsmith.estimate.target import Subject


@dataclass(frozen=True)
class Planned:
    """``stored`` are the lengths of the distinct rows in order, ``training`` those of the rows of a pass, with ``repeats`` of each."""

    stored: list[int]
    training: list[int]
    repeats: list[int]
    told: model.Rows


def planned(config: Config, subject: Subject, results: Path, rows: int | None, row_tokens: int | None) -> Planned:
    """The rows of the run; ``rows`` of ``row_tokens`` each where both are given.

    Raises :class:`DraftsmithError` when nothing can be known of them.
    """
    if rows is not None and row_tokens is not None:
        return _given(rows, row_tokens)
    if rows is not None or row_tokens is not None:
        raise DraftsmithError("--rows and --row-tokens go together; give both or none")
    path = results / "tokenize" / "rows.parquet"
    return _known(config, path, results) if path.is_file() else _estimated(config, subject, results)


def _given(rows: int, row_tokens: int) -> Planned:
    lengths = [row_tokens] * rows
    told = model.Rows(
        how="estimated", explained="as --rows and --row-tokens say, all for training and half of each row supervised", rows=rows,
        tokens=rows * row_tokens, longest=row_tokens, training_tokens=rows * row_tokens, supervised_tokens=rows * row_tokens // 2,
        prompts=0, conversations=rows,
    )  # fmt: skip
    return Planned(lengths, lengths, [1] * rows, told)


def _known(config: Config, path: Path, results: Path) -> Planned:
    from draftsmith.rows import read_rows, stored_length

    columns = ["row_id", "length", "split", "supervised"] + (["span_ends"] if config.extract.supervised_only else [])
    table = read_rows(path, columns, ["repeats"])
    lengths = [int(length) for length in table["length"]]
    if config.extract.supervised_only:
        lengths = [stored_length(length, ends) for length, ends in zip(lengths, table["span_ends"], strict=True)]
    distinct = dict(zip(table["row_id"], lengths, strict=True))
    training = (table["split"] == "train").tolist()
    whole = [int(length) for length, is_ours in zip(table["length"], training, strict=True) if is_ours]
    given = [int(times) for times in table["repeats"]] if "repeats" in table else [1] * len(lengths)
    repeats = [times for times, is_ours in zip(given, training, strict=True) if is_ours]
    prompts = _lines(results / "tokenize" / "prompts.jsonl")
    told = model.Rows(
        how="known", explained=f"as {path} has them", rows=len(distinct), tokens=sum(distinct.values()),
        longest=max(distinct.values(), default=0), training_tokens=sum(a * b for a, b in zip(whole, repeats, strict=True)),
        supervised_tokens=int(table["supervised"].sum()), prompts=prompts, conversations=len(table) + prompts,
    )  # fmt: skip
    return Planned(list(distinct.values()), whole, repeats, told)


def _lines(path: Path) -> int:
    return sum(1 for line in path.read_text().splitlines() if line) if path.is_file() else 0


def _estimated(config: Config, subject: Subject, results: Path) -> Planned:
    taken = sample(config, subject.folder, results)
    settings = config.tokenize
    lengths, supervised = _cut(taken, settings.max_length, settings.truncate == "drop")
    if not lengths:
        raise DraftsmithError(
            f"of {len(taken.lengths)} conversations that were looked at none gives a row; see data.sources"
        )
    # Of the sampled conversations some give no row.
    usable = taken.conversations * len(lengths) / max(1, len(taken.lengths) + taken.unusable)
    prompts = min(settings.evaluation_per_domain * max(1, taken.domains), int(usable) // 2)
    count = max(1, round(usable - prompts))
    stored = list(islice(cycle(lengths), count))
    held_out = round(count * settings.validation_fraction)
    # Spread over the rows, so that both splits have the sample's lengths.
    away = {place * count // held_out for place in range(held_out)} if held_out else set()
    training = [length for place, length in enumerate(stored) if place not in away]
    share = supervised / sum(lengths)
    tokens = sum(stored)
    told = model.Rows(
        how="estimated", explained=taken.explained, rows=count, tokens=tokens, longest=max(stored),
        training_tokens=round(sum(training) * taken.repeats), supervised_tokens=round(tokens * share), prompts=prompts,
        conversations=taken.conversations, answers=taken.answers, answer_tokens=taken.answer_tokens,
    )  # fmt: skip
    return Planned(stored, training, [max(1, round(taken.repeats))] * len(training), told)


def _cut(taken: Sample, longest: int, drop: bool) -> tuple[list[int], int]:
    """Lengths of the rows that the sample gives, and how many of their tokens are supervised."""
    lengths, supervised = [], 0
    for length, answer in zip(taken.lengths, taken.supervised, strict=True):
        if length > longest and drop:
            continue
        lengths.append(min(length, longest))
        supervised += round(answer * min(1.0, longest / length))
    return lengths, supervised
