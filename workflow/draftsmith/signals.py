"""SIGTERM asks for an orderly end: finish the batch or save the checkpoint, then leave."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

# What a shell reports for a process ended by SIGTERM.
EXIT_TERMINATED = 128 + signal.SIGTERM


class Termination:
    """Within a ``with`` block SIGTERM only sets :attr:`asked`; a second one acts as it would have without the block."""

    def __init__(self) -> None:
        self.asked = False
        self.name = "SIGTERM"

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(signal.SIGTERM, self._previous)

    def __enter__(self) -> Termination:
        self._previous = signal.signal(signal.SIGTERM, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGTERM, self._previous)
