"""Conversations and rows."""

from __future__ import annotations

from typing import Any

from draftsmith.report import charts
from draftsmith.report.data import Gathered
from draftsmith.report.failures import failure_details
from draftsmith.report.model import Cell, Chart, Fact, Section, Table
from draftsmith.report.sections import left_out
from draftsmith.report.values import count, dig, listing, mapping, number, pairs, rate, ratio, share, shown, text, total

_SPLITS = ("train", "validation", "evaluation")
_LACKING = "not in tokenize.json"
# Domains that are shown by themselves.
_DOMAINS = 30


def section(gathered: Gathered) -> Section:
    """What was read, what became of it, and what was left out for which reason."""
    made = Section(
        "data",
        "Data",
        "Conversations are rendered by the target's chat template; only the assistant's answers, each with its "
        "end-of-turn token, are supervised.",
    )
    report = gathered.of("tokenize")
    if "tokenize" in gathered.absent:
        made.missing = gathered.absent["tokenize"]
        return made
    made.facts = _facts(report)
    made.charts = [_domains(report), _lengths(report)]
    regenerated = gathered.of("merge_answers")
    tables = [
        left_out.sources(report),
        left_out.conversations(report, "tokenize", "Conversations left out, by reason"),
        left_out.rows(report),
        left_out.packing(report),
    ]
    if regenerated:
        tables += [
            _regenerated(regenerated),
            left_out.conversations(regenerated, "regenerate", "Conversations left out of the regeneration"),
        ]
    made.tables = [table for table in tables if table is not None]
    made.details += failure_details(listing(regenerated, "failed"), "conversation_id", "conversation")
    return made


def _facts(report: dict[str, Any]) -> list[Fact]:
    tokens, supervised = number(report, "tokens"), number(report, "supervised")
    return [
        Fact("Conversations read", shown(number(report, "conversations"), count, _LACKING)),
        Fact(
            "Rows",
            shown(number(report, "rows"), count, _LACKING),
            f"one a {dig(report, 'row_per') or 'conversation'}; train and validation",
        ),
        Fact("Training rows", shown(number(report, "by_split", "train"), count, _LACKING)),
        Fact("Validation rows", shown(number(report, "by_split", "validation"), count, _LACKING)),
        Fact("Tokens", shown(tokens, count, _LACKING), "in all rows"),
        Fact(
            "Supervised share",
            shown(ratio(supervised, tokens), share, _LACKING),
            f"{count(supervised)} of {count(tokens)} tokens" if supervised is not None and tokens else "",
        ),
        Fact("Truncated rows", shown(number(report, "truncated"), count, _LACKING), "cut at tokenize.max_length"),
        Fact("Answers found by", text(dig(report, "mask_method"), _LACKING), "how supervised spans are located"),
        *_optional(report),
    ]


def _optional(report: dict[str, Any]) -> list[Fact]:
    """Figures that not every run has."""
    known = (
        ("Tokens saved", "tokens_saved", "by one row a conversation instead of one a turn"),
        ("Conversations reused", "reused", "made by an earlier run, and the same since"),
        ("Conversations made", "made", "in the last run"),
        ("Given as tokens", "given_as_tokens", "conversations that came with input_ids and loss_mask"),
        (
            "Conversations by turn",
            "conversations_by_turn",
            "the template rewrites their history, so each answer is a row",
        ),
        (
            "Straddled answers",
            "straddled_answers",
            "begin within a token of the header; supervised from the next token on",
        ),
    )
    found = [(label, number(report, key), note) for label, key, note in known]
    return [Fact(label, shown(value, count, ""), note) for label, value, note in found if value]


def _domains(report: dict[str, Any]) -> Chart:
    title = "Rows by split and domain"
    domains = _largest(mapping(report, "by_domain"))
    if not domains:
        return Chart("domains", title, why=f"no figures by domain: {_LACKING}")
    parts = {split: [number(found, split) for found in domains.values()] for split in _SPLITS}
    figure = charts.stacked(
        list(domains),
        {
            "train rows": parts["train"],
            "validation rows": parts["validation"],
            "evaluation prompts": parts["evaluation"],
        },
        x="rows or prompts",
    )
    table = Table(
        title,
        ["Domain", "Train rows", "Validation rows", "Evaluation prompts"],
        [
            [name, *(shown(number(found, split), count, _LACKING) for split in _SPLITS)]
            for name, found in domains.items()
        ],
    )
    return Chart(
        "domains",
        title,
        "Splits are made by conversation; evaluation prompts are kept away from training and answered by the served "
        "draft.",
        figure,
        table,
    )


def _largest(domains: dict[str, Any]) -> dict[str, Any]:
    """The domains of the most rows and prompts, and all others as one."""
    if len(domains) <= _DOMAINS:
        return domains
    ranked = sorted(domains, key=lambda name: -(total([number(domains, name, split) for split in _SPLITS]) or 0))
    few, rest = ranked[:_DOMAINS], ranked[_DOMAINS:]
    summed = {split: total([number(domains, name, split) for name in rest]) for split in _SPLITS}
    return {name: domains[name] for name in few} | {f"{len(rest)} others": summed}


def _lengths(report: dict[str, Any]) -> Chart:
    title = "Row lengths"
    bins = _bins(pairs(report, "length_histogram"))
    if not bins:
        return Chart("lengths", title, why=f"no histogram of lengths: {_LACKING}")
    figure = charts.columns(
        [name for name, _ in bins], {"rows": [value for _, value in bins]}, x="tokens of a row", y="rows"
    )
    table = Table(title, ["Tokens of a row", "Rows"], [[name, count(value)] for name, value in bins])
    return Chart("lengths", title, "Rows of each length, after cutting.", figure, table)


def _bins(found: list[tuple[float, float]]) -> list[tuple[str, float]]:
    """Rows by range of lengths; the stage gives each range by its upper end, a power of two, and leaves out empty ones."""
    counts = {int(upper): value for upper, value in found if upper >= 1}
    uppers = [1 << power for power in range(min(counts).bit_length() - 1, max(counts).bit_length())] if counts else []
    return [(f"{upper // 2 + 1}–{upper}" if upper > 2 else str(upper), counts.get(upper, 0)) for upper in uppers]  # noqa: RUF001


def _regenerated(report: dict[str, Any]) -> Table:
    lacking = "not in regenerate/regenerate.json"
    rows: list[list[Cell]] = [
        ["Conversations asked", shown(number(report, "conversations"), count, lacking)],
        ["Conversations kept", shown(number(report, "kept"), count, lacking)],
        ["Kept from an earlier run", shown(number(report, "reused"), count, lacking)],
        ["Answers", shown(number(report, "answers"), count, lacking)],
        ["Tokens in answers", shown(number(report, "answer_tokens"), count, lacking)],
        ["Tokens generated in the last run", shown(number(report, "generated_tokens"), count, lacking)],
        ["Shards", shown(number(report, "shards"), count, lacking)],
        ["Speed of a shard", shown(number(report, "tokens_per_second"), rate, "nothing was generated in the last run")],
    ]
    rows += [
        [f"Answers that ended by '{reason}'", count(number(value) or 0)]
        for reason, value in mapping(report, "finish_reasons").items()
    ]
    rows += [
        [f"Conversations cut short by '{reason}'", count(number(value) or 0)]
        for reason, value in mapping(report, "shortened").items()
    ]
    return Table("Answers written anew by the target", ["Figure", "Value"], rows)
