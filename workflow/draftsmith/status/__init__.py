"""``draftsmith status``: how far a run is, from any terminal that sees its files, while it runs and after.

It reads files only: it takes no lock, writes nothing, and asks neither a GPU nor a scheduler. So it answers as quickly on a
login node as beside the run, and cannot disturb it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

from draftsmith.errors import DraftsmithError
from draftsmith.status import snakemake_log
from draftsmith.status.jobs import Places, jobs
from draftsmith.status.model import Status
from draftsmith.status.stages import STAGES


def status(results: Path) -> Status:
    """The state of the run in ``results`` (results/NAME)."""
    places = Places(results.absolute())
    log = snakemake_log.read(places.root, places.name)
    found = Status(
        name=places.name,
        results=str(results),
        time=time.time(),
        jobs=jobs(places, log),
        snakemake=None if log is None else log.summary,
    )
    # A lock alone may be that of a Snakemake that was killed.
    if found.snakemake is not None and found.snakemake.locked and (found.count("running") or found.count("queued")):
        found.snakemake.active = True
    return found


def find(root: Path) -> Path:
    """results/NAME of the run that was written to last, in the working folder ``root``.

    Raises :class:`DraftsmithError` when there is none.
    """
    # Logs come before results, as a run's first job writes nothing else until its end.
    names = {path.name for kind in ("results", "logs") for path in (root / kind).glob("*") if path.is_dir()}
    found = sorted(names - {"slurm", "benchmarks"}, key=lambda name: _touched(root, name))
    if not found:
        raise DraftsmithError(
            f"{root.absolute()}: no run has left results or logs here; give --results path/to/results/NAME"
        )
    return root / "results" / found[-1]


def _is_run(results: Path) -> bool:
    """Whether a run has left anything there; its first job writes nothing but a log until its end."""
    places = Places(results.absolute())
    begun = any((results / stage.output).exists() for stage in STAGES) or (results / "extract").is_dir()
    return begun or places.logs.is_dir()


def _touched(root: Path, name: str) -> float:
    folders = [root / "results" / name, root / "logs" / name, root / "logs" / name / "progress"]
    return max((folder.stat().st_mtime for folder in folders if folder.is_dir()), default=0.0)


def run(results: Path | None, *, watch: bool, as_json: bool, every: float) -> None:
    """Print the state of a run, once or anew every ``every`` seconds until it is over or Ctrl-C.

    Raises :class:`DraftsmithError` when there is no such run; to watch one that has not begun, it is waited for.
    """
    try:
        if not watch:
            _print(status(_found(results)), as_json)
        elif as_json or not sys.stdout.isatty():
            _lines(results, every, as_json)
        else:
            _live(results, every)
    except KeyboardInterrupt:
        # Asked for: no error, and no stack.
        sys.exit(0)


def _found(results: Path | None) -> Path:
    """results/NAME of the run that is asked for."""
    if results is None:
        return find(Path())
    if not _is_run(results):
        raise DraftsmithError(f"{results}: no such run; give the folder results/NAME, which `ls results` shows")
    return results


def _looks(results: Path | None, every: float) -> Iterator[Status]:
    """The run's state every so many seconds, from when it is there until it is over."""
    waiting = False
    while True:
        try:
            found = status(_found(results))
        except DraftsmithError as reason:
            if not waiting:
                # What is asked for on standard output stays alone there.
                print(f"{reason}\nwaiting until it is there; Ctrl-C leaves", file=sys.stderr, flush=True)
            waiting = True
        else:
            yield found
            # Its folders are there a moment before its first job.
            if found.over and found.count("waiting") < len(found.jobs):
                return
        time.sleep(every)


def _print(found: Status, as_json: bool) -> None:
    from rich.console import Console

    from draftsmith.status import table

    if as_json:
        print(found.model_dump_json(indent=2), flush=True)
    elif sys.stdout.isatty():
        Console().print(table.table(found))
    else:
        print("\n".join(table.plain(found)), flush=True)


def _lines(results: Path | None, every: float, as_json: bool) -> None:
    """For a file or a pipe: the whole once, then what has changed; as JSON one object a line."""
    from draftsmith.status import table

    before: list[str] = []
    for found in _looks(results, every):
        if as_json:
            print(found.model_dump_json(), flush=True)
        else:
            lines = table.plain(found)
            changed = [line for line in lines[1:] if line not in before]
            if changed:
                print("\n".join([lines[0], *changed]), flush=True)
            before = lines


def _live(results: Path | None, every: float) -> None:
    from rich.live import Live

    from draftsmith.status import table

    looks = _looks(results, every)
    # Begun only now: nothing else may be printed while it is on.
    with Live(table.table(next(looks)), auto_refresh=False) as live:
        for found in looks:
            live.update(table.table(found), refresh=True)
