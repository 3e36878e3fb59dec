"""Errors of single rows or conversations: one entry to unfold for each distinct error, with its whole traceback."""

from __future__ import annotations

from typing import Any

from draftsmith.report.model import Detail

_LISTED = 20
_DISTINCT = 50


def failure_details(failed: list[Any], key: str, noun: str) -> list[Detail]:
    """Group entries of ``{key, error, traceback}`` by traceback, the most frequent first."""
    groups: dict[tuple[str, str], list[str]] = {}
    for entry in failed:
        if isinstance(entry, dict):
            error = (str(entry.get("error") or ""), str(entry.get("traceback") or ""))
            groups.setdefault(error, []).append(str(entry.get(key, "?")))
    ranked = sorted(groups.items(), key=lambda item: -len(item[1]))
    details = [_detail(error, trace, ids, noun) for (error, trace), ids in ranked[:_DISTINCT]]
    if len(ranked) > _DISTINCT:
        rest = sum(len(ids) for _, ids in ranked[_DISTINCT:])
        details.append(
            Detail(
                f"{len(ranked) - _DISTINCT} more kinds of errors, of {rest} {noun}s, are in the stage's JSON file", ""
            )
        )
    return details


def _detail(error: str, trace: str, ids: list[str], noun: str) -> Detail:
    # An exception without a text leaves "Type: ".
    first = (error.strip().splitlines() or ["an error without a text"])[0].rstrip(": ")
    named = ", ".join(ids[:_LISTED]) + (f" and {len(ids) - _LISTED} more" if len(ids) > _LISTED else "")
    plural = noun if len(ids) == 1 else f"{noun}s"
    return Detail(f"{len(ids)} {plural}: {first}", trace or error or "no traceback was recorded", f"{plural}: {named}")
