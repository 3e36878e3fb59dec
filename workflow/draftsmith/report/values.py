"""Numbers as a reader wants them, and what is shown where a number is missing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

DASH = "–"  # noqa: RUF001


class Shown(NamedTuple):
    """A value as text; ``why`` says why it is missing, and is empty when it is there."""

    text: str
    why: str = ""

    def __str__(self) -> str:
        return self.text


def dig(data: Any, *path: str | int) -> Any:
    """The value at ``path`` inside mappings and lists; None as soon as a part of it is not there."""
    for part in path:
        if isinstance(data, dict):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and -len(data) <= part < len(data):
            data = data[part]
        else:
            return None
    return data


def number(data: Any, *path: str | int) -> float | int | None:
    """As :func:`dig`, but None for what is no finite number."""
    found = dig(data, *path)
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        return None
    return found


def mapping(data: Any, *path: str | int) -> dict[str, Any]:
    """As :func:`dig`, but empty for what is no mapping."""
    found = dig(data, *path)
    return found if isinstance(found, dict) else {}


def listing(data: Any, *path: str | int) -> list[Any]:
    """As :func:`dig`, but empty for what is no list."""
    found = dig(data, *path)
    return found if isinstance(found, list) else []


def numbers(data: Any, *path: str | int) -> list[float | int | None]:
    """As :func:`listing`, with None for each entry that is no number."""
    return [number(entry) for entry in listing(data, *path)]


def pairs(data: Any, *path: str | int) -> list[tuple[float, float]]:
    """The pairs of two numbers in a list; whatever else is in it is left out."""
    found = [numbers(entry) for entry in listing(data, *path)]
    return [(pair[0], pair[1]) for pair in found if len(pair) == 2 and pair[0] is not None and pair[1] is not None]


def ratio(part: float | None, whole: float | None) -> float | None:
    """``part`` / ``whole``; None where one is missing or the whole is 0."""
    return None if part is None or not whole else part / whole


def total(values: list[float | int | None]) -> float | None:
    """Sum of what is there; None when nothing is."""
    there = [value for value in values if value is not None]
    return sum(there) if there else None


def shown(value: Any, form: Callable[[Any], str], why: str) -> Shown:
    """``value`` put into words by ``form``, or a dash and the reason why there is none."""
    return Shown(DASH, why) if value is None else Shown(form(value))


def missing(why: str) -> Shown:
    """A dash and the reason for it."""
    return Shown(DASH, why)


def text(value: Any, why: str) -> Shown:
    """A string or another plain value as it is; None and empty text are missing."""
    return Shown(DASH, why) if value is None or value == "" else Shown(str(value))


def count(value: float) -> str:
    """A whole number with separated thousands."""
    return f"{value:,.0f}"


def decimal(value: float) -> str:
    """Two digits behind the point."""
    return f"{value:,.2f}"


def precise(value: float) -> str:
    """Four significant digits."""
    return f"{value:.4g}"


def share(value: float) -> str:
    """A fraction of 1 in per cent."""
    return f"{value:.1%}"


def rate(value: float) -> str:
    """Tokens per second."""
    return f"{value:,.0f} tokens/s" if value >= 100 else f"{value:,.1f} tokens/s"


def size(value: float) -> str:
    """Bytes in decimal units: 1 kB = 1000 bytes."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:,.0f} {unit}" if unit == "bytes" or abs(value) >= 100 else f"{value:,.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"


def counted(value: float, noun: str) -> str:
    """A number with its noun, in the plural where it is not 1."""
    return f"{count(value)} {noun}" if value == 1 else f"{count(value)} {noun}s"


def duration(seconds: float) -> str:
    """Seconds as the two largest units that say something."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def times(value: float) -> str:
    """A factor."""
    return f"{value:.2f} ×"  # noqa: RUF001


def yes(value: bool) -> str:
    """A truth value in a word."""
    return "yes" if value else "no"
