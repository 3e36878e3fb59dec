"""Ends orphans: SIGTERM, wait, SIGKILL, each to the process with this number and this start time and to no other."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress

import psutil

from draftsmith.clean_gpus.holders import Holder
from draftsmith.errors import DraftsmithError
from draftsmith.processes import Identity, identity, send, wait

# vLLM gives its workers 5 s and its core a few more.
TERM_SECONDS, KILL_SECONDS = 15.0, 5.0
# What has lost its core ends on its own within moments, where it does at all.
FOLLOW_SECONDS = 1.0


def end(orphans: Sequence[Holder]) -> None:
    """End the orphans and all that descends from them.

    SIGTERM goes first to those without another orphan above them, as an engine's core ends its workers and tidies up by
    itself; then to what outlives them, and SIGKILL to what outlives that. Raises :class:`DraftsmithError` when even that
    does not help.
    """
    found = {holder.process: holder for holder in orphans if holder.process.alive and not _tidies(holder.process)}
    below = dict.fromkeys(child for process in found for child in _below(process))
    tops = [process for process in found if process not in below]
    every = list(dict.fromkeys([*found, *below]))
    for process in tops:
        send(process, signal.SIGTERM)
    stubborn = wait(tops, TERM_SECONDS)
    for process in wait(below, FOLLOW_SECONDS):
        send(process, signal.SIGTERM)
    for process in wait([*stubborn, *below], 0.0 if stubborn else TERM_SECONDS):
        send(process, signal.SIGKILL)
    left = wait(every, KILL_SECONDS)
    if left:
        names = "; ".join(
            found[process].sentence() if process in found else f"process {process.pid}" for process in left
        )
        raise DraftsmithError(
            f"SIGKILL does not end {names}; it hangs in the driver or on a disk: `dmesg` tells more, a reboot may be needed"
        )


def _tidies(process: Identity) -> bool:
    """Whether it is Python's own tracker of shared memory, which removes that of the others when they have ended, and then ends."""
    with suppress(psutil.Error):
        return any("multiprocessing.resource_tracker" in word for word in psutil.Process(process.pid).cmdline())
    return False


def _below(process: Identity) -> list[Identity]:
    """Descendants of ``process`` that are this user's."""
    below = []
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                found = identity(child.pid)
                if found is not None and child.uids().real == os.getuid() and not _tidies(found):
                    below.append(found)
    # Read after the children, so that they are those of the process that was meant.
    return below if process.alive else []
