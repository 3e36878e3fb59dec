"""How far the extraction is: a line now and then, for a terminal and a log file alike."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from draftsmith import progress_file
from draftsmith.extract_shard.publish import Publisher
from draftsmith.log import log, on_terminal

_LOG_SECONDS = 10.0
_WINDOW_SECONDS = 60.0
# vLLM's own lines that tell whether a load is healthy. What is in brackets changes nothing.
_PHASES = [
    re.compile(pattern)
    for pattern in (
        r"Using .*(?:backend|attention|Attention|kernel).*",
        r"Starting to load model .*",
        r"Loading (?:safetensors|weights|pt).*?\d+% Completed \| \d+/\d+.*",
        r"Loading weights took .*",
        r"Model loading took .*",
        r"(?:GPU|CPU) KV cache size.*",
        r"(?:Compiling|Capturing|torch\.compile).*",
        r"init engine .*",
    )
]
_PREFIX = re.compile(r"^(?:\(\w+[^)]*\)\s*)?(?:(?:INFO|WARNING|ERROR)\s+[\d-]+ [\d:]+ \[[^\]]*\]\s*)?")


class Progress:
    """Rows, tokens/s, bytes, time left and failures, every ten seconds."""

    def __init__(self) -> None:
        self.rows = self.tokens = self.done_rows = self.done_tokens = 0
        self.begun: float | None = None
        self._last = 0.0
        # (time, tokens done) of the last minute: the rate of the moment, not that of the start.
        self._window: deque[tuple[float, int]] = deque()

    def expect(self, rows: int, tokens: int) -> None:
        """Add to what there is to do; the clock starts with the first of it, so that no load counts."""
        if self.begun is None:
            self.begun = self._last = time.perf_counter()
        self.rows += rows
        self.tokens += tokens

    def add(self, tokens: int) -> None:
        """Count a row that the engine has finished."""
        if not self.done_rows:
            log("extract: the first row came back")
        self.done_rows += 1
        self.done_tokens += tokens

    def show(self, publisher: Publisher, always: bool = False) -> None:
        """Print the line, if it is time."""
        now = time.perf_counter()
        if self.begun is None or (not always and now - self._last < _LOG_SECONDS):
            return
        self._last = now
        while self._window and now - self._window[0][0] > _WINDOW_SECONDS:
            self._window.popleft()
        since, before = self._window[0] if self._window else (self.begun, 0)
        if always:
            since, before = self.begun, 0
        rate = (self.done_tokens - before) / max(now - since, 1e-9)
        self._window.append((now, self.done_tokens))
        rest = self.tokens - self.done_tokens
        left = f", about {_duration(rest / rate)} left" if rest and rate else ""
        progress_file.report(
            self.done_rows, self.rows, "rows", tokens=self.done_tokens, tokens_per_second=rate, seconds_left=rest / rate if rate else None,
            batches=publisher.batches, written=publisher.bytes, failed=len(publisher.failed),
            failures=[f"{entry['type']}: {entry['message']}" for entry in publisher.failed.values()], always=always,
        )  # fmt: skip
        failed = f", {len(publisher.failed)} rows failed" if publisher.failed else ""
        log(
            f"extract: {self.done_rows}/{self.rows} rows, {rate:,.0f} tokens/s, {publisher.batches} batches "
            f"({_size(publisher.bytes)}) written{failed}{left}"
        )


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _duration(seconds: float) -> str:
    hours, minutes = divmod(int(seconds) // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"


class LoadPhases(threading.Thread):
    """Shows what vLLM says of its load, when its output goes to a log file: on a terminal it can be read as it is.

    Every process of vLLM writes to the same file, so it is read back from where this one found it.
    """

    def __init__(self, descriptor: int = 1, interval: float = 0.5) -> None:
        super().__init__(name="draftsmith-load", daemon=True)
        self.interval = interval
        self._end = threading.Event()
        self._seen: set[str] = set()
        self._path: Path | None = None
        with suppress(OSError):
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if path.is_file():
                self._path, self._at = path, path.stat().st_size

    def __enter__(self) -> LoadPhases:
        if self._path is not None and os.environ.get("DRAFTSMITH_CONSOLE"):
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self.is_alive():
            self.join()
            self._look()

    def run(self) -> None:
        """Look until the load has ended."""
        while not self._end.wait(self.interval):
            self._look()

    def _look(self) -> None:
        assert self._path is not None
        with suppress(OSError), open(self._path, "rb") as file:
            file.seek(self._at)
            text = file.read()
            # The last line may not be whole.
            end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
            self._at += end
            for line in re.split(r"[\r\n]+", text[:end].decode(errors="replace")):
                phrase = phase(line)
                if phrase is not None and phrase not in self._seen:
                    self._seen.add(phrase)
                    progress_file.report(None, phase=f"loading: {phrase[:100]}", always=True)
                    # In the log file vLLM's own line is a line above.
                    on_terminal(f"vLLM: {phrase[:160]}")


def phase(line: str) -> str | None:
    """What a line of vLLM's log tells of the load, without its time and process; None for all other lines."""
    words = _PREFIX.sub("", line).strip()
    return words if any(pattern.match(words) for pattern in _PHASES) else None
