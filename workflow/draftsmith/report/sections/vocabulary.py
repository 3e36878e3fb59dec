"""The draft vocabulary and what it covers."""

from __future__ import annotations

from draftsmith.report import charts
from draftsmith.report.data import Gathered
from draftsmith.report.model import Chart, Fact, Section, Table
from draftsmith.report.values import count, dig, number, pairs, ratio, share, shown

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
    return made


def _coverage(gathered: Gathered, size: float | None) -> Chart:
    title = "Coverage by size of the draft vocabulary"
    report = gathered.of("map_vocabulary")
    points = [(at, value) for at, value in pairs(report, "coverage_by_size") if at > 0]
    if not points:
        return Chart("coverage", title, why=f"no coverage by size: {_LACKING}")
    coverage = number(report, "coverage")
    mark = (size, coverage, f"chosen: {share(coverage)}") if size and coverage is not None else None
    figure = charts.lines(
        {"coverage": points},
        x="tokens in the draft vocabulary",
        y="coverage",
        percent=True,
        logarithmic=True,
        mark=mark,
    )
    table = Table(title, ["Size", "Coverage"], [[count(at), share(value)] for at, value in points])
    return Chart(
        "coverage",
        title,
        "Share of the supervised training tokens inside a vocabulary of the most frequent tokens.",
        figure,
        table,
    )
