"""A sample of rows, token by token, and how much of the rows is supervised."""

from __future__ import annotations

from typing import Any

from draftsmith.report import charts
from draftsmith.report.data import Gathered
from draftsmith.report.model import Cell, Chart, Fact, Notice, Section, Table
from draftsmith.report.samples import sample
from draftsmith.report.values import count, dig, listing, mapping, pairs, share, shown

_LACKING = "not in look/look.json"
_NONE, _WHOLE = 0, 11


def section(gathered: Gathered) -> Section:
    """The masks themselves: whoever looks at a few rows sees what no figure tells."""
    made = Section(
        "rows",
        "Rows",
        "A fixed sample of the rows as the target reads them. What the draft learns is underlined and tinted: each answer "
        "with its end-of-turn token, and nothing of headers. A dot is a space, an arrow a line break or a tab.",
    )
    report = gathered.of("look")
    if "look" in gathered.absent:
        made.missing = gathered.absent["look"]
        return made
    shares = {split: pairs(report, "supervised_shares", split) for split in mapping(report, "supervised_shares")}
    made.facts = _facts(report, shares)
    made.notices = _notices(report, shares)
    made.charts = [_shares(shares), _answers(report)]
    made.samples = [sample(given, place) for place, given in enumerate(listing(report, "sample"), 1)]
    if not made.samples:
        made.notices.append(Notice("warn", f"No rows are shown: {_LACKING}."))
    return made


def _facts(report: dict[str, Any], shares: dict[str, list[tuple[float, float]]]) -> list[Fact]:
    def rows(at: int) -> float | None:
        return sum(value for found in shares.values() for key, value in found if key == at) if shares else None

    return [
        Fact("Rows shown", shown(len(listing(report, "sample")) or None, count, _LACKING), f"chosen by a seed ({dig(report, 'seed')}): the same for the same rows"),
        Fact("Rows without a supervised token", shown(rows(_NONE), count, _LACKING), "they would teach nothing"),
        Fact("Rows supervised whole", shown(rows(_WHOLE), count, _LACKING), "prompts and headers would be learnt too"),
    ]  # fmt: skip


def _notices(report: dict[str, Any], shares: dict[str, list[tuple[float, float]]]) -> list[Notice]:
    made = []
    if problem := dig(report, "tokenizer"):
        made.append(Notice("warn", f"Tokens are shown as ids: {problem}."))
    for at, what in ((_NONE, "have no supervised token"), (_WHOLE, "are supervised whole, from the first token on")):
        found = {split: value for split, values in shares.items() for key, value in values if key == at and value}
        if found:
            listed = ", ".join(f"{count(value)} of split {split}" for split, value in found.items())
            made.append(Notice("fail", f"Rows {what}: {listed}. Look at the mask before anything is extracted."))
    return made


def _shares(shares: dict[str, list[tuple[float, float]]]) -> Chart:
    title = "Supervised share of a row"
    if not any(shares.values()):
        return Chart("shares", title, why=f"no shares: {_LACKING}")
    bins = range(_NONE, _WHOLE + 1)
    names = ["0", *(f"≤{tenth}0" for tenth in range(1, 10)), "<100", "100"]
    counts = {split: [dict(values).get(key, 0) for key in bins] for split, values in shares.items()}
    figure = charts.columns(
        names, {_rows_of(split): values for split, values in counts.items()}, x="per cent of its tokens", y="rows"
    )
    rows: list[list[Cell]] = [
        [name, *(count(values[place]) for values in counts.values())] for place, name in enumerate(names)
    ]
    table = Table(title, ["Per cent supervised", *map(_rows_of, counts)], rows)
    return Chart(
        "shares", title, "How much of each row is supervised; rows at either end are masked wrongly.", figure, table
    )


def _answers(report: dict[str, Any]) -> Chart:
    title = "Length of an answer"
    found = {split: pairs(report, "answer_lengths", split) for split in mapping(report, "answer_lengths")}
    uppers = sorted({int(upper) for values in found.values() for upper, _ in values if upper >= 1})
    if not uppers:
        return Chart("answers", title, why=f"no lengths of answers: {_LACKING}")
    bins = [1 << power for power in range(uppers[0].bit_length() - 1, uppers[-1].bit_length())]
    names = [f"{upper // 2 + 1}–{upper}" if upper > 2 else str(upper) for upper in bins]  # noqa: RUF001
    whole = {split: sum(value for _, value in values) or 1 for split, values in found.items()}
    parts = {split: [dict(values).get(upper, 0) / whole[split] for upper in bins] for split, values in found.items()}
    figure = charts.columns(
        names, {_rows_of(split): values for split, values in parts.items()}, x="supervised tokens in a row", y="share of answers",
        percent=True,
    )  # fmt: skip
    table = Table(
        title,
        ["Tokens of an answer", *map(_rows_of, parts)],
        [[name, *(share(values[place]) for values in parts.values())] for place, name in enumerate(names)],
    )
    note = "Each supervised span by itself; answers that are all cut at one length stand in one column."
    return Chart("answers", title, note, figure, table)


def _rows_of(split: str) -> str:
    return f"{split} rows"
