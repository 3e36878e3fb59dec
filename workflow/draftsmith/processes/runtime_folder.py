"""A folder of this user on this machine, for what only counts while processes live: leases of GPUs, lists of leftovers."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from draftsmith.errors import DraftsmithError

VARIABLE = "DRAFTSMITH_RUNTIME"
"""Names another folder; all jobs that may meet on a machine need the same one."""


def runtime_folder(name: str) -> Path:
    """The sub-folder ``name``, made if missing; nobody else may write there.

    It does not follow TMPDIR or XDG_RUNTIME_DIR, which differ between a login, a tmux and a batch job of one user.
    Raises :class:`DraftsmithError` when the folder is a link or another user's.
    """
    root = Path(os.environ.get(VARIABLE) or f"/tmp/draftsmith-{os.getuid()}")
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = root.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise DraftsmithError(
                f"{root}: is a link, another user's, or open to others; remove it, or name another folder in {VARIABLE}"
            )
        folder = root / name
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder
    except OSError as error:
        raise DraftsmithError(
            f"{root}: cannot be written ({error.strerror}); name another folder in {VARIABLE}"
        ) from None
