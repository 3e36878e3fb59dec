"""Room on the store's disk, before the first batch and while they are written."""

from __future__ import annotations

import errno
import shutil
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from draftsmith.errors import DraftsmithError

# For file heads, manifests and the ledger.
_MARGIN = 64 << 20
_LOOK_SECONDS = 1.0


def states_bytes(tokens: int, per_token: int) -> int:
    """Bytes of the batch files of so many tokens, with their ids and heads."""
    return int(tokens * (per_token + 4) * 1.01)


def needed(tokens: int, per_token: int) -> int:
    """Bytes that must be free before the first of so many tokens is extracted."""
    return states_bytes(tokens, per_token) + _MARGIN


def held(folder: Path) -> int:
    """Bytes of the files in ``folder``, beside others that rename and remove them: one that is gone by now has none."""
    total = 0
    for path in folder.glob("*"):
        with suppress(FileNotFoundError):
            found = path.stat()
            total += found.st_size if stat.S_ISREG(found.st_mode) else 0
    return total


def check_space(folder: Path, tokens: int, per_token: int) -> None:
    """Fail unless the missing states fit on the disk."""
    need, free = needed(tokens, per_token), shutil.disk_usage(folder).free
    if need > free:
        raise DraftsmithError(
            f"{folder}: {tokens} tokens need {need / 1e9:.2f} GB and {free / 1e9:.2f} GB are free; "
            "free some, or name another folder in extract.store"
        )


class Room:
    """Says when to stop: while there is still room for what the engine has begun."""

    def __init__(self, folder: Path, reserve: Callable[[], int]) -> None:
        """``reserve`` gives the number of bytes that may still be written once it is said to stop."""
        self.folder, self.reserve = folder, reserve
        self._looked = 0.0
        self.reason: str | None = None

    def short(self) -> str | None:
        """The reason to stop, once free space has become less than the reserve; looked at once a second."""
        now = time.monotonic()
        if self.reason is None and now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            free = shutil.disk_usage(self.folder).free
            need = self.reserve() + _MARGIN
            if free < need:
                self.reason = (
                    f"{self.folder}: only {free / 1e9:.2f} GB are free, and what is begun may need {need / 1e9:.2f} GB"
                )
        return self.reason


def is_full(error: BaseException | None, folder: Path) -> bool:
    """Whether an error, or what caused it, is that the disk is full."""
    if shutil.disk_usage(folder).free < 1 << 20:
        return True
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__ or error.__context__
    return False
