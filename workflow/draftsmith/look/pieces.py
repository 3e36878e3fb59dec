"""The text of each token of a row, and rows that are too long cut down to what surrounds the borders of their spans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from draftsmith.chat import Chat
from draftsmith.errors import DraftsmithError

Span = tuple[int, int]

# Tokens of a row that are shown at most, and how many on each side of a border are tried for, the most first.
_TOKENS = 600
_AROUND = (128, 96, 64, 48, 32, 24, 16, 12, 8)
# A character has no more bytes than this, and so spans no more tokens.
_CHARACTER_BYTES = 4
# Longest text of a token that is shown, in characters: some vocabularies have long runs of spaces or of dashes.
_CHARACTERS = 80
_NOT_WHOLE = "\ufffd"


class Speller:
    """Turns token ids into texts; without a tokenizer, for which ``problem`` says why, into the ids in words."""

    def __init__(self, decode: Callable[[Sequence[int]], str], special: frozenset[int], problem: str = "") -> None:
        self.decode, self.special, self.problem = decode, special, problem

    @classmethod
    def load(cls, target: dict[str, Any]) -> Speller:
        """Open the tokenizer of ``target`` (the content of target.json)."""
        try:
            chat = Chat.load(target, {})
        except (DraftsmithError, OSError, ValueError, KeyError) as error:
            # A page with ids is better than none.
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            return cls(_ids, frozenset(), f"the target's tokenizer cannot be opened ({reason})")
        return cls(chat.decode, chat.special)

    def spell(self, ids: Sequence[int]) -> list[str]:
        """The text of each of ``ids`` [n]; joined, they are the text of all.

        A token that ends within a character gets none: the character belongs to the token that completes it. Decoded is
        always a token with those before it, as on its own it may lose its space.
        """
        if self.problem:
            return [_ids([token]) for token in ids]
        texts: list[str] = []
        begin = done = 0
        for place in range(len(ids)):
            before, now = self.decode(ids[begin:done]), self.decode(ids[begin : place + 1])
            if now.endswith(_NOT_WHOLE) and place + 1 - done < _CHARACTER_BYTES and place + 1 < len(ids):
                texts.append("")
                continue
            texts.append(now[len(before) :])
            begin, done = done, place + 1
        return texts


def _ids(ids: Sequence[int]) -> str:
    return "".join(f"[{token}]" for token in ids)


def kept(length: int, spans: Sequence[Span]) -> list[Span]:
    """The half-open stretches of a row that are shown: all of it, or as much around each border as there is room for.

    With more borders than fit, those of the first and of the last spans.
    """
    if length <= _TOKENS:
        return [(0, length)]
    for around in _AROUND:
        stretches = _around(length, spans, around)
        if sum(end - start for start, end in stretches) <= _TOKENS:
            return stretches
    # A span takes two borders with both their sides, and at most as much again as one side in gaps that are filled.
    few = _TOKENS // (10 * _AROUND[-1])
    return _around(length, [*spans[:few], *spans[-few:]], _AROUND[-1])


def _around(length: int, spans: Sequence[Span], around: int) -> list[Span]:
    merged: list[list[int]] = []
    for border in sorted({0, length, *(border for span in spans for border in span)}):
        start, end = max(0, border - around), min(length, border + around)
        # A gap of a few tokens takes as much room as they do.
        if merged and start <= merged[-1][1] + _AROUND[-1]:
            merged[-1][1] = end
        else:
            merged.append([start, end])
    return [(start, end) for start, end in merged]


def parts(ids: Sequence[int], spans: Sequence[Span], speller: Speller) -> list[dict[str, Any]]:
    """A row as runs of tokens that are all supervised or all not, with what was left out between them.

    A run is ``{start, supervised, tokens: [[id, text, special], …]}``, a gap ``{start, left_out, supervised}`` with how
    many of its tokens are supervised.
    """
    inside = [False] * len(ids)
    for start, end in spans:
        inside[start:end] = [True] * (min(end, len(ids)) - start)
    made: list[dict[str, Any]] = []
    done = 0
    for start, end in kept(len(ids), spans):
        if start > done:
            made.append({"start": done, "left_out": start - done, "supervised": sum(inside[done:start])})
        # Borders of spans are borders of runs, even between two that touch.
        edges = sorted({start, end, *(edge for span in spans for edge in span if start < edge < end)})
        # With what comes before: the first token may be the end of a character, or lose its space.
        lead = min(start, _CHARACTER_BYTES)
        texts = speller.spell(ids[start - lead : end])[lead:]
        for first, last in pairwise(edges):
            tokens = [
                [int(ids[place]), _short(texts[place - start]), int(ids[place]) in speller.special]
                for place in range(first, last)
            ]
            made.append({"start": first, "supervised": inside[first], "tokens": tokens})
        done = end
    if done < len(ids):
        made.append({"start": done, "left_out": len(ids) - done, "supervised": sum(inside[done:])})
    return made


def _short(text: str) -> str:
    # Half of a surrogate pair has no UTF-8 form.
    text = text.encode(errors="replace").decode()
    return text if len(text) <= _CHARACTERS else f"{text[: _CHARACTERS - 1]}…"
