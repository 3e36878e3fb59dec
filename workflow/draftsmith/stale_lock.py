"""``python -m draftsmith.stale_lock``: free a folder that a killed Snakemake has left locked, unless somebody is at work in it.

A kill -9 of Snakemake leaves its lock behind, and sometimes its jobs. The lock may go when nothing of that run is alive;
a job that still is would write the same files as the next run.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from draftsmith.errors import DraftsmithError
from draftsmith.log import log

LOCKS = Path(".snakemake/locks")


def is_ours(command: Sequence[str]) -> bool:
    """Whether a command line is Snakemake, a stage of Draftsmith or an engine that one of them started."""
    if not command:
        return False
    modules = {command[place + 1] for place, word in enumerate(command[:-1]) if word == "-m"}
    names = {Path(word).name for word in command[:2]}
    return bool({"snakemake", "draftsmith"} & (modules | names)) or command[0].startswith("VLLM::")


def at_work(folder: Path) -> dict[int, str]:
    """Command lines by process id of what works in ``folder``; this process and those that called it do not count."""
    import psutil

    me = psutil.Process()
    callers = {me.pid, *(parent.pid for parent in me.parents())}
    found = {}
    for process in psutil.process_iter():
        try:
            if process.pid not in callers and Path(process.cwd()) == folder and is_ours(command := process.cmdline()):
                found[process.pid] = " ".join(command)
        except (psutil.Error, OSError):
            # Gone meanwhile, or somebody else's.
            continue
    return found


def run(folder: Path) -> None:
    """Remove the lock of a run that was killed.

    Raises :class:`DraftsmithError` when a process of an earlier run still works in ``folder``.
    """
    alive = at_work(folder.resolve())
    if alive:
        process, command = next(iter(alive.items()))
        raise DraftsmithError(
            f"{folder.resolve()}: process {process} ({command:.80}) is at work here; wait for it, or end it with `kill {process}`"
        )
    if any((folder / LOCKS).glob("*")):
        log("an earlier run was killed: its lock is removed, and what it finished is kept")
        subprocess.run([sys.executable, "-m", "snakemake", "--profile", "local", "--unlock"], cwd=folder, check=True)


def main() -> None:
    """The command line."""
    try:
        run(Path.cwd())
    except DraftsmithError as error:
        log(f"error: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
