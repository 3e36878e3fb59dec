"""What a stage tells of itself while it runs: small JSON files that ``draftsmith status`` reads, from whatever machine.

Two a job, in the folder that DRAFTSMITH_PROGRESS names (the rules name logs/NAME/progress; where it is not set nothing is
written). ``STAGE.json``, or ``STAGE.ITEM.json`` of a scattered one, says that the job lives: who runs it, since when, on
which GPUs, and how it ended; a thread writes it anew every few seconds, so that one which is old was left by a process that
is gone. ``….counts.json`` says how far the work is; whichever of the job's processes does it writes it, at most every two
seconds. Neither can make a stage fail: what cannot be written is left out.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from draftsmith.files import atomic_path
from draftsmith.processes import pid_namespace

FOLDER = "DRAFTSMITH_PROGRESS"
# The job's own file, told to the processes that it starts.
_FILE = "DRAFTSMITH_PROGRESS_FILE"
COUNTS = ".counts.json"
FORMAT = 1
BEAT_SECONDS = 5.0
_COUNT_SECONDS = 2.0
_TERMINATED = 143
# Commands that are no rule.
_NO_STAGES = ("status", "estimate", "store")
_counted = 0.0
# Held through a fork: a child must not be born while the driver's library is at work for the thread, which it would wait for.
_beating = threading.Lock()
os.register_at_fork(before=_beating.acquire, after_in_parent=_beating.release, after_in_child=_beating.release)


def report(
    done: int | None,
    total: int | None = None,
    unit: str | None = None,
    *,
    phase: str | None = None,
    tokens: int | None = None,
    tokens_per_second: float | None = None,
    seconds_left: float | None = None,
    batches: int | None = None,
    written: int | None = None,
    failed: int = 0,
    failures: Sequence[str] = (),
    always: bool = False,
) -> None:
    """Say how far the work is: ``done`` of ``total`` things called ``unit``, or in which ``phase`` where nothing is counted.

    ``written`` is in bytes; ``failures`` are first lines, of which a few are kept. Left out within two seconds of the last
    call unless ``always``, and without a word where nobody asked for it.
    """
    global _counted
    path, now = os.environ.get(_FILE), time.monotonic()
    if path is None or (not always and now - _counted < _COUNT_SECONDS):
        return
    _counted = now
    counts = {
        "format": FORMAT, "time": time.time(), "done": done, "total": total, "unit": unit, "phase": phase, "tokens": tokens,
        "tokens_per_second": tokens_per_second, "seconds_left": seconds_left, "batches": batches, "bytes": written,
        "failed": failed, "failures": list(failures)[:5],
    }  # fmt: skip
    _write(Path(path.removesuffix(".json") + COUNTS), counts)


@contextmanager
def watched(arguments: Sequence[str]) -> Iterator[None]:
    """Within the block the command of ``arguments`` (as in ``sys.argv[1:]``) counts as a job that runs, if it is a stage."""
    folder = os.environ.get(FOLDER)
    stage = next(iter(arguments), "").replace("-", "_")
    # A process that the job has started tells nothing of its own life.
    within = _FILE in os.environ
    if within or not folder or not stage or stage.startswith("_") or stage in _NO_STAGES:
        yield
        return
    life = _Life(Path(folder), stage, _item(arguments))
    os.environ[_FILE] = str(life.path)
    life.start()
    try:
        yield
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 1
        if isinstance(error, SystemExit) and not code:
            life.end("done")
        elif code == _TERMINATED or isinstance(error, KeyboardInterrupt):
            life.end("stopped")
        else:
            life.end("failed", first_line(error))
        raise
    else:
        life.end("done")
    finally:
        os.environ.pop(_FILE, None)


def first_line(error: BaseException) -> str:
    """The first line of an error's text, and what it announces; with its type, unless it is one that a user is meant to read."""
    from draftsmith.errors import DraftsmithError, opening

    text = opening(str(error).splitlines())
    return text if isinstance(error, DraftsmithError) and text else f"{type(error).__name__}: {text}".rstrip(": ")


def _item(arguments: Sequence[str]) -> str | None:
    for place, argument in enumerate(arguments):
        if argument == "--scatteritem":
            return next(iter(arguments[place + 1 :]), None)
        if argument.startswith("--scatteritem="):
            return argument.partition("=")[2]
    return None


class _Life(threading.Thread):
    """Writes the job's own file until its end."""

    def __init__(self, folder: Path, stage: str, item: str | None) -> None:
        super().__init__(name="draftsmith-progress", daemon=True)
        self.path = (folder / f"{stage}{f'.{item}' if item else ''}.json").absolute()
        self._owner = os.getpid()
        self._done = threading.Event()
        self._state: dict[str, Any] = {
            "format": FORMAT, "stage": stage, "item": item, "state": "running", "pid": self._owner,
            "pid_started": _process_start(), "pid_namespace": pid_namespace(), "host": socket.gethostname(),
            "slurm_job": os.environ.get("SLURM_JOB_ID"), "started": time.time(), "ended": None, "error": None,
            "log": _log_path(), "beat_seconds": BEAT_SECONDS,
        }  # fmt: skip

    def run(self) -> None:
        """Beat until the end."""
        self._beat()
        while not self._done.wait(BEAT_SECONDS):
            self._beat()

    def end(self, state: str, error: str | None = None) -> None:
        """The job has come to its end; in a process that was forked from it this changes nothing."""
        if os.getpid() != self._owner:
            return
        self._done.set()
        self._state |= {"state": state, "error": error, "ended": time.time()}
        self._beat()

    def _beat(self) -> None:
        with _beating:
            _write(self.path, self._state | {"updated": time.time(), "gpus": _gpus()})


def _process_start() -> float | None:
    import psutil

    with suppress(psutil.Error):
        return psutil.Process().create_time()
    return None


def _log_path() -> str | None:
    """The file that standard error goes to, if it is one: a rule's log."""
    with suppress(OSError, ValueError):
        path = Path(os.readlink(f"/proc/self/fd/{sys.stderr.fileno()}"))
        return str(path) if path.is_file() else None
    return None


def _gpus() -> list[dict[str, Any]]:
    """The granted GPUs: memory in bytes, how busy in per cent (None where the driver does not tell, as with MIG)."""
    try:
        # Not hardware.gpus: the stage may not have chosen its GPUs yet, and what that once found it keeps.
        from draftsmith.gpus import nvml

        return [_gpu(device) for device in nvml.devices()]
    except Exception:
        # No driver, or one that does not answer, is the stage's business.
        return []


def _gpu(device: Any) -> dict[str, Any]:
    from draftsmith.gpus import nvml

    busy = None
    with suppress(Exception), nvml.told() as library:
        busy = int(library.nvmlDeviceGetUtilizationRates(device.handle).gpu)
    total, used = nvml.memory(device)
    return {"index": device.index, "name": nvml.name(device), "used": used, "total": total, "busy": busy}


def _write(path: Path, value: dict[str, Any]) -> None:
    # After a power cut nobody asks how far the work was; and a full disk ends the stage by itself, with a better message.
    with suppress(OSError), atomic_path(path, synced=False) as temporary:
        temporary.write_text(json.dumps(value))
