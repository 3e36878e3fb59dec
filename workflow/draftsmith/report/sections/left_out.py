"""Tables of what was left out: reason codes with what they mean, how often each came up, and its first example."""

from __future__ import annotations

from typing import Any

from draftsmith.report.model import Cell, Table
from draftsmith.report.reasons import meanings
from draftsmith.report.values import count, dig, listing, mapping, number, ratio, share, shown

_UNKNOWN = "no module of this version knows the code"
_CHARACTERS = 300


def conversations(report: dict[str, Any], stage: str, caption: str) -> Table | None:
    """Conversations left out by ``stage``; None where its figures do not tell."""
    if "dropped" not in report:
        return None
    dropped = _counts(report, "dropped")
    if not dropped:
        return Table(caption, ["Reason", "Conversations"], [["none was left out", ""]])
    whole = number(report, "conversations")
    known = meanings(stage)
    examples = mapping(report, "dropped_examples")
    rows: list[list[Cell]] = [
        [
            reason,
            shown(known.get(reason), str, _UNKNOWN),
            _cut(examples.get(reason)),
            count(value),
            shown(ratio(value, whole), share, "the number of conversations is not known"),
        ]
        for reason, value in dropped
    ]
    return Table(
        caption, ["Reason", "What it means", "First example", "Conversations", "Share of all"], rows, numeric=3
    )


def rows(report: dict[str, Any]) -> Table | None:
    """Rows left out of conversations that gave others; None where there are none."""
    known = meanings("tokenize")
    dropped: list[list[Cell]] = [
        [reason, shown(known.get(reason), str, _UNKNOWN), count(value)]
        for reason, value in _counts(report, "dropped_rows")
    ]
    caption = "Single rows left out, of conversations that gave others"
    return Table(caption, ["Reason", "What it means", "Rows"], dropped, numeric=2) if dropped else None


def sources(report: dict[str, Any]) -> Table | None:
    """What each source gave; None where the figures do not tell."""
    lacking = "not in tokenize.json"
    parts = ("kept", "unusable", "duplicates", "same_prompt", "not_sampled")
    columns = ("read", *parts, "rows", "tokens")
    found = listing(report, "sources")
    made: list[list[Cell]] = [
        [
            str(dig(source, "path") or place),
            str(dig(source, "revision") or "")[:12],
            shown(number(source, "weight"), lambda value: f"{value:g}", lacking),
            *(shown(number(source, column), count, lacking) for column in columns),
        ]
        for place, source in enumerate(found)
    ]
    what = ["Kept", "Unusable", "Duplicates", "Same prompt", "Not sampled"]
    head = ["Source", "Revision", "Weight", "Read", *what, "Rows", "Tokens"]
    note = (
        f"What was read is the sum of the next {len(what)} columns. Kept: conversations that train, validate or are asked in the "
        "evaluation. Unusable: what counts against data.max_dropped_fraction. Duplicates: near duplicates too. Same prompt: it asks "
        "what is kept for the evaluation, or for another split. Not sampled: left out by a weight below 1."
    )
    return Table("Sources", head, made, numeric=2, note=note) if made else None


def packing(report: dict[str, Any]) -> Table | None:
    """How full training's packs are by their size; None where the figures do not tell."""
    lacking = "not in tokenize.json"
    made: list[list[Cell]] = [
        [
            shown(number(entry, key), form, lacking)
            for key, form in (("pack_tokens", count), ("packs", count), ("fill", share))
        ]
        for entry in listing(report, "packing", "by_pack_tokens")
    ]
    padding = number(report, "packing", "padding_if_padded")
    note = (
        ""
        if padding is None
        else f"Filled up to the longest row instead, {share(padding)} of all tokens would be padding."
    )
    head = ["train.pack_tokens", "Packs a pass", "Filled"]
    return Table("Packs of training, by size", head, made, note=note) if made else None


def _counts(report: dict[str, Any], key: str) -> list[tuple[str, float]]:
    found = [(reason, value) for reason in mapping(report, key) if (value := number(report, key, reason)) is not None]
    return sorted(found, key=lambda entry: -entry[1])


def _cut(example: Any) -> str:
    text = "" if example is None else str(example)
    return text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]}…"
