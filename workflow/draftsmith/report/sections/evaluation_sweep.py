"""Acceptance by draft length and temperature, and speed by requests in flight; nothing where nothing was measured."""

from __future__ import annotations

from typing import Any

from draftsmith.report import charts
from draftsmith.report.model import Cell, Chart, Table
from draftsmith.report.values import (
    count,
    decimal,
    dig,
    listing,
    mapping,
    missing,
    number,
    precise,
    rate,
    share,
    shown,
    times,
    yes,
)

_LACKING = "not in evaluate/evaluate.json"
_SAMPLED = "only greedy answers can be compared"
_LENGTHS = "Acceptance length by draft length"


def draw(report: dict[str, Any]) -> list[Chart]:
    """Charts of what evaluate.ks, evaluate.temperatures and evaluate.concurrency have asked for."""
    return [*_lengths(_sweep(report)), *_concurrency(report)]


def tables(report: dict[str, Any]) -> list[Table]:
    """Acceptance of each draft length and temperature by position and by domain."""
    sweep = _sweep(report)
    if not sweep:
        return []
    width = max(len(listing(each, "per_position")) for each in sweep)
    positions: list[list[Cell]] = [
        [*_named(each), *(_position(each, place) for place in range(width))] for each in sweep
    ]
    names = list(dict.fromkeys(name for each in sweep for name in mapping(each, "per_domain")))
    domains: list[list[Cell]] = [
        [*_named(each), *(shown(number(each, "per_domain", name, "acceptance_length"), decimal, _LACKING) for name in names)]
        for each in sweep
    ]  # fmt: skip
    head = ["Draft length k", "Temperature"]
    return [
        Table(
            "Acceptance by position, of each draft length",
            [*head, *(f"Position {place + 1}" for place in range(width))],
            positions,
            note="Share of drafts whose tokens were accepted up to this position. 1 + the sum of a row is its acceptance length.",
        ),
        Table("Acceptance length by domain, of each draft length", [*head, *names], domains),
    ]


def _sweep(report: dict[str, Any]) -> list[Any]:
    return [each for each in listing(report, "sweep") if number(each, "k") is not None]


def _named(each: Any) -> list[Cell]:
    return [shown(number(each, "k"), count, _LACKING), shown(number(each, "temperature"), precise, _LACKING)]


def _position(each: Any, place: int) -> Cell:
    if place >= len(listing(each, "per_position")):
        return missing("a shorter draft has no such position")
    return shown(number(each, "per_position", place), share, _LACKING)


def _lengths(sweep: list[Any]) -> list[Chart]:
    curves: dict[str, list[tuple[float, float | int | None]]] = {}
    rows: list[list[Cell]] = []
    for each in sweep:
        temperature = number(each, "temperature")
        curve = curves.setdefault("temperature " + ("unknown" if temperature is None else f"{temperature:g}"), [])
        curve.append((number(each, "k") or 0, number(each, "acceptance_length")))
        equal = dig(each, "outputs_equal")
        rows.append([
            *_named(each),
            *(shown(number(each, key), count, _LACKING) for key in ("drafts", "accepted")),
            shown(number(each, "acceptance_length"), decimal, _LACKING),
            shown(number(each, "tokens_per_second", "draft"), rate, _LACKING),
            shown(number(each, "speedup"), times, _LACKING),
            shown(equal if isinstance(equal, bool) else None, yes, _SAMPLED if temperature else _LACKING),
        ])  # fmt: skip
    if not sweep:
        return []
    columns = [
        "Draft length k",
        "Temperature",
        "Drafts",
        "Accepted",
        "Acceptance length",
        "Tokens/s",
        "Speed-up",
        "Answers equal",
    ]
    note = (
        "1 + accepted / drafts, the same prompts for all. Speed-up: tokens/s with the draft / without, at the same temperature, all "
        "prompts of a domain sent at once. A longer draft costs more, so that the fastest need not be the longest."
    )
    # Beyond the colours that there are, curves would share them.
    colours = charts.SERIES if len(curves) <= len(charts.SERIES) else charts.ordered(len(curves))
    figure = charts.lines(
        curves, x="tokens proposed per step (k)", y="acceptance length", colours=colours, measured=True
    )
    return [Chart("acceptance-by-k", _LENGTHS, note, figure, Table(_LENGTHS, columns, rows))]


def _concurrency(report: dict[str, Any]) -> list[Chart]:
    title = "Speed by requests in flight"
    found = sorted(
        (each for each in listing(report, "concurrency") if number(each, "requests") is not None),
        key=lambda each: number(each, "requests") or 0,
    )
    if not found:
        return []
    names = {"target alone": "plain", "with the draft": "draft"}
    curves = {
        name: [(number(each, "requests") or 0, number(each, "tokens_per_second", key)) for each in found]
        for name, key in names.items()
    }
    rows: list[list[Cell]] = [
        [
            shown(number(each, "requests"), count, _LACKING),
            *(shown(number(each, "tokens_per_second", key), rate, _LACKING) for key in names.values()),
            shown(number(each, "speedup"), times, _LACKING),
        ]
        for each in found
    ]
    table = Table(title, ["Requests in flight", *names, "Speed-up"], rows)
    note = (
        "Generated tokens per second with as many requests as this always in flight; warm-up, and the end where fewer are left, "
        "are not counted. The more requests share a step of the target, the less a draft saves."
    )
    figure = charts.lines(curves, x="requests in flight", y="tokens/s", from_zero=True, logarithmic=True)
    return [Chart("concurrency", title, note, figure, table)]
