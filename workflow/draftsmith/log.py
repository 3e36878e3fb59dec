"""One line a message, with the time, for terminals and log files alike."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress

# In the environment, as an engine's processes speak for their shard too; a log file is one shard's in any case.
_SHARD = "DRAFTSMITH_SHARD"


def log(message: str) -> None:
    """Print ``message`` to standard error with the local time in front, and flush.

    A rule sends standard error to its log file and names in DRAFTSMITH_CONSOLE a descriptor of the terminal, where these
    lines, and not the engine's hundreds, are shown as well.
    """
    print(f"{time.strftime('%H:%M:%S')} {message}", file=sys.stderr, flush=True)
    on_terminal(message)


def on_terminal(message: str) -> None:
    """Show ``message`` on the rule's terminal alone, if there is one, with the time and the shard."""
    console = os.environ.get("DRAFTSMITH_CONSOLE")
    if console:
        shard = f"{os.environ[_SHARD]} " if _SHARD in os.environ else ""
        with suppress(OSError, ValueError):
            os.write(int(console), f"{time.strftime('%H:%M:%S')} {shard}{message}\n".encode())


def of_shard(scatteritem: str) -> None:
    """Name the shard (as ``1-of-2``) in what the terminal shows of this process and its children, unless it is the only one."""
    if not scatteritem.endswith("-of-1"):
        os.environ[_SHARD] = scatteritem
