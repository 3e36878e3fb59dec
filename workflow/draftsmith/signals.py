"""SIGTERM asks for an orderly end: finish the batch or save the checkpoint, then leave."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType, TracebackType

# What a shell reports for a process ended by SIGTERM.
EXIT_TERMINATED = 128 + signal.SIGTERM
# Slurm signals every process of a job, and the one that has started the others passes it on: that is one request.
_SAME_REQUEST_SECONDS = 5.0
_HEARD = (
    b"SIGTERM: what is begun, a load as well, is brought to its end first; a second one, 5 s later, ends it at once\n"
)


class Termination:
    """Within a ``with`` block SIGTERM only sets :attr:`asked`; a second one, five seconds later or more, acts as it would have without the block."""

    def __init__(self) -> None:
        self.asked = False
        self.name = "SIGTERM"

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if not self.asked:
            self.asked, self._when = True, time.monotonic()
            # Not by way of a buffer, which the signal may have come in the middle of.
            os.write(2, _HEARD)
        elif time.monotonic() - self._when >= _SAME_REQUEST_SECONDS:
            signal.signal(signal.SIGTERM, self._previous)
            signal.raise_signal(signal.SIGTERM)

    def __enter__(self) -> Termination:
        self._previous = signal.signal(signal.SIGTERM, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGTERM, self._previous)
