"""The one exception that a user is meant to read, and what an error's text begins with."""

from __future__ import annotations

from collections.abc import Iterable


class DraftsmithError(Exception):
    """Bad input or an unusable machine, told in one sentence that names the thing and the mend.

    The command line prints the text without a traceback and exits with 1. Anything else that is raised is a fault of
    the program or of the engine, and keeps its whole traceback.
    """


def opening(lines: Iterable[str]) -> str:
    """The first line of an error's text; the one after it as well where the first ends in a colon, as it only announces that.

    Empty lines are passed over, and so is the dash of a list's first entry. Empty for a text without words.
    """
    words = (line.strip() for line in lines)
    said = [line for line in words if line]
    if len(said) > 1 and said[0].endswith(":"):
        return f"{said[0]} {said[1].removeprefix('- ')}"
    return said[0] if said else ""
