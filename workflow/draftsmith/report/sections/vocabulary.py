"""The draft vocabulary and what it covers."""

from __future__ import annotations

from draftsmith.report import charts
from draftsmith.report.data import Gathered
from draftsmith.report.model import Cell, Chart, Fact, Section, Table
from draftsmith.report.values import Shown, count, dig, mapping, number, pairs, ratio, share, shown

_LACKING = "not in vocabulary/vocabulary.json"


def section(gathered: Gathered) -> Section:
    """Size, coverage, and how the coverage would be with another size."""
    made = Section(
        "vocabulary",
        "Vocabulary",
        "The draft proposes only the target's most frequent tokens. Coverage = share of the supervised training "
        "tokens that are among them; any other token is a sure rejection.",
    )
    report = gathered.of("map_vocabulary")
    if "map_vocabulary" in gathered.absent:
        made.missing = gathered.absent["map_vocabulary"]
        return made
    size, target = number(report, "size"), number(report, "target_size")
    kept = dig(report, "kept_special")
    made.facts = [
        Fact("Draft vocabulary", shown(size, count, _LACKING), "tokens"),
        Fact("Target vocabulary", shown(target, count, _LACKING), "tokens, padding included"),
        Fact("Kept", shown(ratio(size, target), share, _LACKING), "of the target's vocabulary"),
        Fact("Coverage", shown(number(report, "coverage"), share, _LACKING), "of the supervised training tokens"),
        *(
            [
                Fact(
                    "Coverage of validation",
                    Shown(share(held_out)),
                    "of supervised tokens that had no say in the choice: what to expect of new text",
                )
            ]
            if (held_out := number(report, "validation", "coverage")) is not None
            else []
        ),
        Fact(
            "Distinct tokens",
            shown(number(report, "distinct"), count, _LACKING),
            "seen in the supervised training tokens",
        ),
        Fact(
            "Unseen",
            shown(number(report, "padded"), count, _LACKING),
            "tokens never seen: special ones, and what fills up the size",
        ),
        Fact(
            "Always kept",
            shown(len(kept) if isinstance(kept, list) else None, count, _LACKING),
            "special tokens that answers end with or contain",
        ),
    ]
    made.charts = [_coverage(gathered, size)]
    made.tables = [table for table in [_sizes(gathered)] if table is not None]
    return made


def _sizes(gathered: Gathered) -> Table | None:
    """How large a vocabulary must be to cover this much."""
    report = gathered.of("map_vocabulary")
    trained, held_out = (dict(pairs(found, "size_by_coverage")) for found in (report, mapping(report, "validation")))
    rows: list[list[Cell]] = [
        [share(wanted), count(size), shown(held_out.get(wanted), count, "no token of a validation row is supervised")]
        for wanted, size in trained.items()
    ]
    head = ["Coverage", "Tokens, for training rows", "Tokens, for validation rows"]
    note = "vocabulary.size: tokens are taken in the order of their frequency in training, special ones first."
    return Table("The smallest vocabulary that covers so much", head, rows, note=note) if rows else None


def _coverage(gathered: Gathered, size: float | None) -> Chart:
    title = "Coverage by size of the draft vocabulary"
    report = gathered.of("map_vocabulary")
    points = [(at, value) for at, value in pairs(report, "coverage_by_size") if at > 0]
    if not points:
        return Chart("coverage", title, why=f"no coverage by size: {_LACKING}")
    coverage = number(report, "coverage")
    mark = (size, coverage, f"chosen: {share(coverage)}") if size and coverage is not None else None
    curves = {"training": points}
    held_out = [(at, value) for at, value in pairs(report, "validation", "coverage_by_size") if at > 0]
    if held_out:
        curves["validation"] = held_out
    figure = charts.lines(
        curves,
        x="tokens in the draft vocabulary",
        y="coverage",
        percent=True,
        logarithmic=True,
        mark=mark,
    )
    found = {name: dict(values) for name, values in curves.items()}
    table = Table(
        title,
        ["Size", *(f"Coverage, {name}" for name in found)],
        [[count(at), *(shown(values.get(at), share, _LACKING) for values in found.values())] for at, _ in points],
    )
    return Chart(
        "coverage",
        title,
        "Share of the supervised tokens inside a vocabulary of training's most frequent tokens; validation rows had no "
        "say in it.",
        figure,
        table,
    )
