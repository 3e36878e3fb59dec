"""How far the regeneration is: a line now and then."""

from __future__ import annotations

import time
from collections import deque

from draftsmith import progress_file
from draftsmith.log import log

_LOG_SECONDS = 10.0
_WINDOW_SECONDS = 60.0


class Progress:
    """Conversations, answers, tokens/s of the last minute, failures, and the time left at the rate so far."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.answers, self.tokens, self.failed = total, 0, 0, 0, 0
        self.begun = self._last = time.monotonic()
        # (time, tokens): the rate of the moment, not that of the start.
        self._window: deque[tuple[float, int]] = deque([(self.begun, 0)])

    @property
    def seconds(self) -> float:
        """Since the first question."""
        return time.monotonic() - self.begun

    def show(self, always: bool = False) -> None:
        """Print the line, if it is time."""
        now = time.monotonic()
        if not always and now - self._last < _LOG_SECONDS:
            return
        self._last = now
        while len(self._window) > 1 and now - self._window[0][0] > _WINDOW_SECONDS:
            self._window.popleft()
        since, before = self._window[0]
        rate = (self.tokens - before) / max(now - since, 1e-9)
        self._window.append((now, self.tokens))
        left = (self.total - self.done) * (now - self.begun) / self.done if self.done else None
        progress_file.report(
            self.done, self.total, "conversations", tokens=self.tokens, tokens_per_second=rate, seconds_left=left,
            failed=self.failed, always=always,
        )  # fmt: skip
        log(
            f"regenerate: {self.done}/{self.total} conversations, {self.answers} answers, {rate:,.0f} tokens/s"
            + (f", {self.failed} failed" if self.failed else "")
            + (f", about {_duration(left)} left" if left else "")
        )


def _duration(seconds: float) -> str:
    hours, minutes = divmod(int(seconds) // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"
