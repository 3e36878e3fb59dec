"""Sample rows of look.json, made ready for the page: every character that cannot be seen gets a sign that can."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from typing import Any

from draftsmith.report.model import Fact, Run, Sample, Token
from draftsmith.report.values import count, counted, dig, listing, number, pairs, ratio, share, shown, text

_LACKING = "not in look/look.json"
_CUT = "cut: it was longer than tokenize.max_length"
_SIGNS = {" ": "space", "\n": "line", "\t": "tab"}
# Format characters, among them those that turn the direction of what follows, and all blanks but the plain one.
_UNSEEN = ("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp", "Zs")


def sample(given: Any, place: int) -> Sample:
    """One row of look.json as the page shows it; ``place`` counts from 1."""
    why = [_seen(reason) for reason in listing(given, "why")]
    length, supervised = number(given, "length"), number(given, "supervised")
    cut = dig(given, "cut") is True
    facts = [
        *(
            Fact(label, text(_seen(dig(given, key)), _LACKING))
            for label, key in (
                ("Row", "row_id"),
                ("Conversation", "conversation_id"),
                ("Source", "source"),
                ("Domain", "domain"),
                ("Split", "split"),
            )
        ),
        Fact("Length", shown(length, lambda value: f"{count(value)} tokens", _LACKING), _CUT if cut else ""),
        Fact(
            "Supervised",
            shown(supervised, lambda value: f"{count(value)} tokens", _LACKING),
            shown(ratio(supervised, length), share, "").text,
        ),
    ]
    runs = [run for part in listing(given, "parts") if (run := _run(part)) is not None]
    if cut:
        runs.append(Run(int(length or 0), False, (), f"here the row was {_CUT}"))
    tokens = {token.place: token for run in runs for token in run.tokens}
    spans = [_span(int(start), int(end), tokens) for start, end in pairs(given, "first_spans")]
    more = (number(given, "spans") or 0) - len(spans)
    if more > 0:
        spans.append(f"and {counted(more, 'more span')}")
    summary = ", ".join(
        part
        for part in (
            shown(length, lambda value: f"{count(value)} tokens", "").text,
            shown(ratio(supervised, length), lambda value: f"{share(value)} supervised", "").text,
            _seen(dig(given, "domain")),
            "cut" if cut else "",
        )
        if part
    )
    title = " · ".join(why) or "a row"
    return Sample(f"row-{place}", title[0].upper() + title[1:], summary, facts, runs, spans)


def _seen(name: Any) -> str:
    """A name from the data, with its unseen characters told; empty for None."""
    return "".join(part for _, part in visible(str(name))) if name else ""


def _run(part: Any) -> Run | None:
    start = int(number(part, "start") or 0)
    left_out = number(part, "left_out")
    if left_out is not None:
        inside = int(number(part, "supervised") or 0)
        what = "none of them supervised" if not inside else f"{count(inside)} of them supervised"
        if inside == left_out:
            what = "all of them supervised"
        return Run(start, inside == left_out, (), f"{count(left_out)} tokens left out, {what}")
    tokens = tuple(
        Token(start + place, dig(entry, 0), bool(dig(entry, 2)), tuple(visible(str(dig(entry, 1) or ""))))
        for place, entry in enumerate(listing(part, "tokens"))
    )
    return Run(start, bool(dig(part, "supervised")), tokens) if tokens else None


def visible(given: str) -> Iterator[tuple[str, str]]:
    """A token's text as (sign, text) pairs: sign '' is plain text, others name what the text is."""
    if not given:
        yield "part", "◌"
        return
    plain = ""
    for character in given:
        sign = _SIGNS.get(character) or ("code" if unicodedata.category(character) in _UNSEEN else "")
        if not sign:
            plain += character
            continue
        if plain:
            yield "", plain
            plain = ""
        yield sign, f"U+{ord(character):04X}" if sign == "code" else character
    if plain:
        yield "", plain


def _span(start: int, end: int, tokens: dict[int, Token]) -> str:
    """A supervised span in words: where it lies, and its first and last token."""
    shown = [tokens[place] for place in (start, end - 1) if place in tokens]
    named = [f"“{''.join(_spelt(*mark) for mark in token.marks)}” ({token.id})" for token in shown]
    length = end - start
    return f"{counted(length, 'token')}, {start} to {end - 1}: {' to '.join(named) or 'not shown'}"


def _spelt(sign: str, part: str) -> str:
    return {"space": "·", "line": "↵", "tab": "→"}.get(sign, part)
