"""The draft at work: what the target accepts, how fast it is, and whether the answers stay the same."""

from __future__ import annotations

from typing import Any

from draftsmith.evaluate_draft.figures import doubts
from draftsmith.report import charts
from draftsmith.report.data import Gathered
from draftsmith.report.model import Cell, Chart, Detail, Fact, Notice, Section, Table
from draftsmith.report.sections import checks, evaluation_sweep
from draftsmith.report.values import (
    DASH,
    count,
    counted,
    decimal,
    dig,
    listing,
    mapping,
    number,
    numbers,
    precise,
    rate,
    share,
    shown,
    size,
    text,
    times,
    yes,
)

_LACKING = "not in evaluate/evaluate.json"
UNTRAINED_OFF = "not measured: evaluate.untrained is off"
_OVERALL = "overall"


def section(gathered: Gathered) -> Section:
    """The served draft's figures, over all and by domain and position; and the exported files' checks."""
    made = Section(
        "evaluation",
        "Evaluation",
        "vLLM serves the target with the exported draft, on prompts kept away from training. Acceptance length = 1 + "
        "accepted / drafts, from vLLM's raw counters: the tokens that one step of the target yields.",
    )
    report = gathered.of("evaluate_draft")
    made.tables += _export(gathered)
    if "evaluate_draft" in gathered.absent:
        made.missing = gathered.absent["evaluate_draft"]
        return made
    made.notices = notices(report)
    made.facts = _facts(gathered, report)
    made.charts = [_domains(report), _positions(report), _throughput(report), *evaluation_sweep.draw(report)]
    made.tables += evaluation_sweep.tables(report)
    differing = listing(report, "differing")
    if differing:
        made.details.append(
            Detail(
                f"{counted(len(differing), 'prompt')} with another answer",
                "\n".join(map(str, differing[:200])),
                "Ids of tokenize/prompts.jsonl.",
            )
        )
    return made


def notices(report: dict[str, Any]) -> list[Notice]:
    """The gate's verdict where it failed, its causes, and answers that differ."""
    made = []
    causes = [str(cause) for cause in listing(report, "gate", "causes")]
    length, minimum = number(report, "acceptance_length"), number(report, "gate", "minimum")
    if dig(report, "gate", "passed") is False:
        least = f" evaluate.min_acceptance_length ({minimum:g})" if minimum is not None else " the configured minimum"
        what = f"The acceptance length{f' {decimal(length)}' if length is not None else ''} is below{least}."
        made.append(
            Notice(
                "fail",
                what
                + (" Likely causes:" if causes else " No known cause was found: train on more data or for longer."),
                causes,
            )
        )
    elif causes:
        made.append(Notice("warn", "The acceptance length is near 1. Likely causes:", causes))
    speeds = {"speedup": number(report, "speedup"), "acceptance_length": length, "one_job": dig(report, "one_job")}
    made += [Notice("warn", f"{doubt[0].upper()}{doubt[1:]}.") for doubt in doubts(speeds)]
    if dig(report, "outputs_equal") is False:
        differing, prompts = len(listing(report, "differing")), number(report, "prompts")
        verb = "differs" if differing == 1 else "differ"
        of = f"{count(differing)} of {counted(prompts, 'answer')} {verb}" if differing and prompts else "Answers differ"
        made.append(
            Notice(
                "warn",
                f"{of} from plain greedy decoding. Rounding can turn near ties, above all with low precision; a "
                "change of many answers is a fault.",
            )
        )
    return made


def _facts(gathered: Gathered, report: dict[str, Any]) -> list[Fact]:
    untrained = number(report, "untrained", "acceptance_length")
    equal = dig(report, "outputs_equal")
    steps = len(listing(gathered.of("train_draft"), "acceptance"))
    drafted = f" with {steps} tokens drafted" if steps else ""
    sampled = "only greedy answers can be compared" if number(report, "temperature") else _LACKING
    return [
        Fact(
            "Acceptance length", shown(number(report, "acceptance_length"), decimal, _LACKING), "1 + accepted / drafts"
        ),
        Fact("Draft length k", shown(number(report, "k"), count, _LACKING), "tokens proposed per step"),
        Fact("Drafts", shown(number(report, "drafts"), count, _LACKING), "steps with a proposal of k tokens"),
        Fact("Accepted", shown(number(report, "accepted"), count, _LACKING), "draft tokens, all positions"),
        Fact("Held-out prompts", shown(number(report, "prompts"), count, _LACKING)),
        Fact("Untrained draft", shown(untrained, decimal, UNTRAINED_OFF), "acceptance length before training"),
        Fact(
            "Simulated",
            shown(
                number(gathered.of("train_draft"), "simulated_acceptance_length"), decimal, "no validation was recorded"
            ),
            f"acceptance length on validation rows{drafted}; other texts than those served",
        ),
        Fact(
            "Speed-up",
            shown(number(report, "speedup"), times, _LACKING),
            "tokens/s with the draft / without",
        ),
        Fact(
            "Answers equal",
            shown(equal if isinstance(equal, bool) else None, yes, sampled),
            "to plain greedy decoding, token by token",
        ),
        Fact("Longest answer", shown(number(report, "max_tokens"), count, _LACKING), "tokens, by evaluate.max_tokens"),
        Fact("Temperature", shown(number(report, "temperature"), precise, _LACKING)),
        Fact("At once", shown(number(report, "requests_at_once"), count, _LACKING), "requests sent together, at most"),
    ]


def _domains(report: dict[str, Any]) -> Chart:
    title = "Acceptance length by domain"
    domains = {_OVERALL: report} | mapping(report, "per_domain")
    lengths = [number(found, "acceptance_length") for found in domains.values()]
    if all(value is None for value in lengths):
        return Chart("acceptance", title, why=f"no acceptance lengths: {_LACKING}")
    untrained = number(report, "untrained", "acceptance_length")
    notes = [
        ", ".join(f"{_counted(found, key)} {key}" for key in ("prompts", "drafts", "accepted"))
        for found in domains.values()
    ]
    figure = charts.bars(
        list(domains),
        lengths,
        x="acceptance length (1 = nothing accepted)",
        notes=notes,
        strong=_OVERALL,
        start=1,
        line=(untrained, f"untrained {untrained:.2f}") if untrained is not None else None,
    )
    rows: list[list[Cell]] = []
    for name, found in domains.items():
        row: list[Cell] = [name]
        row += [shown(number(found, key), count, _LACKING) for key in ("prompts", "drafts", "accepted")]
        row.append(shown(number(found, "acceptance_length"), decimal, _LACKING))
        row += [shown(number(found, "per_position", place), share, _LACKING) for place in range(_width(report))]
        rows.append(row)
    positions = [f"Position {place + 1}" for place in range(_width(report))]
    table = Table(title, ["Domain", "Prompts", "Drafts", "Accepted", "Acceptance length", *positions], rows)
    return Chart("acceptance", title, "1 + accepted / drafts over the prompts of the domain.", figure, table)


def _width(report: dict[str, Any]) -> int:
    return len(listing(report, "per_position"))


def _counted(found: Any, key: str) -> str:
    value = number(found, key)
    return DASH if value is None else count(value)


def _positions(report: dict[str, Any]) -> Chart:
    title = "Acceptance by position"
    width = _width(report)
    if not width:
        return Chart("positions", title, why=f"no acceptance by position: {_LACKING}")
    series = {"trained": numbers(report, "per_position")}
    untrained = numbers(report, "untrained", "per_position")
    if untrained:
        series["untrained"] = untrained
    names = [str(place + 1) for place in range(width)]
    figure = charts.columns(names, series, x="position in the draft", y="share of drafts", percent=True)
    rows: list[list[Cell]] = [
        [name, *(shown(number(values, place), share, _LACKING) for values in series.values())]
        for place, name in enumerate(names)
    ]
    return Chart(
        "positions",
        title,
        "Share of drafts whose tokens were accepted up to this position. 1 + their sum is the acceptance length.",
        figure,
        Table(title, ["Position", *series], rows),
    )


def _throughput(report: dict[str, Any]) -> Chart:
    title = "Throughput with and without the draft"
    names = {"target alone": "plain", "with the draft": "draft"}
    values = [number(report, "tokens_per_second", key) for key in names.values()]
    if all(value is None for value in values):
        return Chart("throughput", title, why=f"no throughput: {_LACKING}")
    figure = charts.bars(list(names), values, x="generated tokens/s", digits=",.1f", strong="with the draft")
    table = Table(
        title,
        ["Serving", "Tokens/s"],
        [[name, shown(value, rate, _LACKING)] for name, value in zip(names, values, strict=True)],
    )
    return Chart(
        "throughput",
        title,
        "Generated tokens per second over the same prompts on the same engine settings; loading and warm-up are not "
        "counted.",
        figure,
        table,
    )


def _export(gathered: Gathered) -> list[Table]:
    report = gathered.of("export_draft")
    lacking = gathered.absent.get("export_draft", "not in draft/export.json")
    rows: list[list[Cell]] = [
        ["Folder", text(dig(report, "folder"), lacking)],
        ["Weights", shown(number(report, "bytes"), size, lacking)],
        ["Made by training", text(dig(report, "fingerprint"), lacking)],
        ["Made for", text(dig(report, "verifier"), lacking)],
    ]
    return [
        Table("Exported draft", ["Figure", "Value"], rows, numeric=2),
        *checks.tables("Checks of the exported files", listing(report, "checks"), "draft/export.json"),
    ]
