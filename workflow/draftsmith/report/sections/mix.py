"""What training and evaluation are about: domains and languages side by side, and where they part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftsmith.report import charts
from draftsmith.report.data import Gathered
from draftsmith.report.model import Cell, Chart, Notice, Section, Table
from draftsmith.report.values import count, dig, mapping, number, share

_LACKING = "not in look/look.json"
_SHOWN = 20
# Half of the summed differences of the shares: 0 for equal mixes, 1 for mixes that share nothing.
_STRONG = 0.3
# A language of fewer prompts than this may be a mistake of the detection.
_LEAST_PROMPTS = 2
_UNDETERMINED = "und"

Mix = Mapping[str, float]


def section(gathered: Gathered) -> Section:
    """Shares of each domain and language, and a warning where the evaluation asks what training does not teach."""
    made = Section(
        "mix",
        "Mix",
        "A draft accepts little of what it never saw, and the acceptance length over all prompts is that of the "
        "evaluation's mix, not of training's. Shares are of training rows and of evaluation prompts.",
    )
    report = gathered.of("look")
    if "look" in gathered.absent:
        made.missing = gathered.absent["look"]
        return made
    trained = {name: number(found, "train", "rows") or 0 for name, found in mapping(report, "by_domain").items()}
    asked = _counts(dig(report, "prompts"))
    spoken, heard = (_counts(dig(report, "languages", "counts", split)) for split in ("train", "evaluation"))
    made.charts = [
        _compared("mix-domains", "Domains", trained, asked, ""),
        _compared(
            "mix-languages",
            "Languages",
            spoken,
            heard,
            f"Of prompts, by {dig(report, 'languages', 'by') or 'a detector'}, of at most 2,000 a side; und: not "
            "determined, such as code or a formula.",
        ),
    ]
    made.notices = [*notices("domain", trained, asked, 1), *notices("language", spoken, heard, _LEAST_PROMPTS)]
    return made


def _counts(given: Any) -> dict[str, float]:
    return {name: value for name in mapping(given) if (value := number(given, name))}


def shares(counts: Mix) -> dict[str, float]:
    """Counts as parts of their sum."""
    whole = sum(counts.values())
    return {name: value / whole for name, value in counts.items() if value} if whole else {}


def distance(one: Mix, other: Mix) -> float:
    """Total variation distance of two mixes: half of the summed differences of their shares."""
    first, second = shares(one), shares(other)
    return sum(abs(first.get(name, 0) - second.get(name, 0)) for name in first.keys() | second.keys()) / 2


def notices(noun: str, trained: Mix, asked: Mix, least: int) -> list[Notice]:
    """Warnings about ``noun`` (domain or language): ones with ``least`` prompts that training lacks, mixes far apart."""
    if not sum(trained.values()) or not sum(asked.values()):
        return []
    made = []
    strange = {
        name: value
        for name, value in asked.items()
        if value >= least and not trained.get(name) and name != _UNDETERMINED
    }
    if strange:
        made.append(
            Notice(
                "warn",
                f"The evaluation asks in a {noun} that training lacks; give rows of it, or its figures say little:",
                [f"{name}: {count(value)} prompts" for name, value in _ranked(strange)[:_SHOWN]],
            )
        )
    apart = distance(trained, asked)
    if apart > _STRONG:
        made.append(
            Notice(
                "warn",
                f"The {noun}s of training and evaluation are mixed differently (distance {apart:.2f} of 1): the acceptance "
                "length over all prompts is not what training's mix would give; read it by domain.",
            )
        )
    return made


def _ranked(counts: Mix) -> list[tuple[str, float]]:
    return sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))


def _compared(chart: str, title: str, trained: Mix, asked: Mix, note: str) -> Chart:
    if not trained:
        return Chart(chart, title, why=f"no {title.lower()} of training: {_LACKING}")
    ranked = [name for name, _ in _ranked(trained)]
    ranked += [name for name, _ in _ranked(asked) if name not in trained]
    # What only the evaluation has must be seen, however many there are of others.
    names = [name for place, name in enumerate(ranked) if place < _SHOWN or not trained.get(name)][: 2 * _SHOWN]
    first, second = shares(trained), shares(asked)
    series = {"training": [first.get(name, 0) for name in names]}
    if asked:
        series["evaluation"] = [second.get(name, 0) for name in names]
    head = [title, "Training rows", "Share", "Evaluation prompts", "Share"]
    rows: list[list[Cell]] = [
        [
            name,
            count(trained.get(name, 0)),
            share(first.get(name, 0)),
            count(asked.get(name, 0)),
            share(second.get(name, 0)),
        ]
        for name in names
    ]
    if len(names) < len(ranked):
        note = f"{note} The {len(names)} of {len(ranked)} that matter most.".strip()
    if not asked:
        note = f"{note} Of the evaluation nothing is known here.".strip()
    return Chart(chart, title, note, charts.compared(names, series, x="share"), Table(title, head, rows))
