"""One line a message, with the time, for terminals and log files alike."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress


def log(message: str) -> None:
    """Print ``message`` to standard error with the local time in front, and flush.

    A rule sends standard error to its log file and names in DRAFTSMITH_CONSOLE a descriptor of the terminal, where these
    lines, and not the engine's hundreds, are shown as well.
    """
    line = f"{time.strftime('%H:%M:%S')} {message}"
    print(line, file=sys.stderr, flush=True)
    console = os.environ.get("DRAFTSMITH_CONSOLE")
    if console is not None:
        with suppress(OSError, ValueError):
            os.write(int(console), f"{line}\n".encode())
