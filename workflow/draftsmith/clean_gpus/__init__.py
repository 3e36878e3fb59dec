"""clean_gpus: who holds the granted GPUs, and what may be done about it.

Only the GPUs that this job was granted are looked at. A process of another user, one of a job of one's own that is alive,
and one of one's own that is not this workflow's are named and left alone. Only an orphan, which a run of this workflow has
started and whose run is gone (known by the run's mark, its user and its start time, never by its name), is ended, and only
when ``clean.kill_orphans`` says so.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftsmith import hardware
from draftsmith.clean_gpus import leftovers
from draftsmith.clean_gpus.ending import end
from draftsmith.clean_gpus.holders import Holder, Look, in_container, look, orphans, trees
from draftsmith.config import Config
from draftsmith.errors import DraftsmithError
from draftsmith.files import write_json
from draftsmith.log import log
from draftsmith.processes import owned_folders, run_mark, wait
from draftsmith.processes.driver_watch import GRACE_SECONDS

# An engine whose driver has just been killed is about to end by itself: at once, or after its grace where it still loads.
SETTLE_SECONDS = GRACE_SECONDS + 3.0
# The driver gives memory back a little after a process has ended.
FREE_SECONDS = 30.0


def check(config: Config) -> list[Holder]:
    """Make sure that nothing holds the granted GPUs; called at the start of every GPU job.

    Returns the processes that were found and are gone now. Raises :class:`DraftsmithError` naming those that stay, or the
    memory that is held by nobody to be seen.
    """
    run_mark.mark_run()
    seen = Look([], [])
    left = orphans()
    if left:
        wait([orphan.process for orphan in left], SETTLE_SECONDS)
        left = [orphan for orphan in left if orphan.process.alive]
    on_gpus = config.engine.device != "cpu" and bool(hardware.gpus())
    if on_gpus:
        before = {gpu.index: gpu.used for gpu in _now()}
        seen = look()
        _refuse(config, seen)
    ended = _end_orphans(config, seen, left)
    if on_gpus:
        _await_memory(config, seen, ended, left)
        for gpu in _now() if ended else ():
            log(
                f"clean: GPU {gpu.index} has {max(0, before[gpu.index] - gpu.used) / 2**20:.0f} MiB back, {gpu.used / 2**20:.0f} are in use"
            )
    leftovers.sweep()
    return ended


def _refuse(config: Config, seen: Look) -> None:
    """Raise for every process on the GPUs that is not to be ended."""
    staying = [holder for holder in seen.holders if holder.owner in ("foreign", "own", "stranger")]
    if staying:
        raise DraftsmithError(
            "the granted GPUs are in use; end these yourself or ask for other GPUs: "
            + "; ".join(holder.sentence() for holder in staying)
        )
    left = [holder for holder in seen.holders if holder.owner == "orphan"]
    if left and not config.clean.kill_orphans:
        raise DraftsmithError(
            "an earlier run left processes on the granted GPUs; end them, or set clean.kill_orphans: true: "
            + "; ".join(holder.sentence() for holder in left)
        )


def _end_orphans(config: Config, seen: Look, left: Sequence[Holder]) -> list[Holder]:
    """End orphans, on the GPUs and on none, when the config says so; those on none cost only memory and cores otherwise."""
    on_gpus = [holder for holder in seen.holders if holder.owner == "orphan"]
    known = {holder.process for holder in on_gpus}
    every = on_gpus + [orphan for orphan in left if orphan.process not in known]
    if not config.clean.kill_orphans:
        for orphan, below in trees(every):
            more = f", and {below} below it" if below else ""
            log(f"clean: an earlier run left {orphan.sentence()}{more}; end it, or set clean.kill_orphans: true")
        return []
    for orphan in every:
        log(f"clean: ending {orphan.sentence()}")
    end(every)
    return every


def _now() -> tuple[hardware.Gpu, ...]:
    hardware.gpus.cache_clear()
    return hardware.gpus()


def _await_memory(config: Config, seen: Look, ended: Sequence[Holder], left: Sequence[Holder]) -> None:
    deadline = time.monotonic() + FREE_SECONDS
    limit = config.clean.max_used_mib * 2**20
    while held := [gpu for gpu in _now() if gpu.used > limit]:
        # The other ranks of a training may have begun.
        mine = {holder.gpu for holder in look().holders if holder.owner == "self"}
        if not (held := [gpu for gpu in held if gpu.index not in mine]):
            return
        if time.monotonic() > deadline:
            raise DraftsmithError(_held_by_nobody(config, held, seen, ended, left))
        time.sleep(min(1.0, FREE_SECONDS))


def _held_by_nobody(
    config: Config, held: Sequence[hardware.Gpu], seen: Look, ended: Sequence[Holder], left: Sequence[Holder]
) -> str:
    after = f" even after process {', '.join(str(holder.pid) for holder in ended)} was ended" if ended else ""
    hidden = {*seen.hidden, *(holder.gpu for holder in seen.holders if holder.owner == "hidden")}
    if left and not ended:
        # Where the driver does not say who is on a GPU, these are the likeliest.
        mend = "an earlier run left these, set clean.kill_orphans: true: " + ", ".join(one.sentence() for one in left)
    elif in_container():
        mend = "this job runs in a container, which hides the processes of others: look with `nvidia-smi` on the host and end them there"
    elif hidden & {gpu.index for gpu in held}:
        mend = "the driver names no process to this user: have `nvidia-smi` looked at by whoever runs the machine"
    else:
        mend = "look with `nvidia-smi` and `fuser -v /dev/nvidia*` as root, or have the GPU reset by whoever runs the machine"
    return (
        f"memory is held on the granted GPUs by no process that can be seen from here{after}: "
        + ", ".join(f"GPU {gpu.index} {gpu.used / 2**20:.0f} MiB" for gpu in held)
        + f"; {mend}, ask for other GPUs, or raise clean.max_used_mib ({config.clean.max_used_mib})"
    )


def run(config: Config, *, report: Path) -> None:
    """Check, and write what was found as JSON; what dead processes left in the store's folders goes as well."""
    gone = check(config)
    store = Path(config.extract.store)
    for root in store.glob("*/.staging"):
        owned_folders.sweep(root, r"\d+-of-\d+")
    owned_folders.sweep(store, r"\.dry-run")
    gpus = [] if config.engine.device == "cpu" else [asdict(gpu) for gpu in hardware.gpus()]
    result: dict[str, Any] = {"gpus": gpus, "ended": [asdict(holder) for holder in gone]}
    write_json(report, result)
    if gpus:
        log(f"clean: {len(gpus)} GPUs granted and free")
    else:
        log(f"clean: nothing to clean, as there is no GPU for this job: {_why(config)}")


def _why(config: Config) -> str:
    return "engine.device is cpu" if config.engine.device == "cpu" else hardware.why_no_gpu()
