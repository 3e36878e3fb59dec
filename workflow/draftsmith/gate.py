"""gate: whether the served acceptance length reaches the config's minimum. A run below it fails here, its page drawn."""

from __future__ import annotations

from pathlib import Path

from draftsmith.errors import DraftsmithError
from draftsmith.files import read_json, write_json
from draftsmith.log import log


def run(*, evaluation: Path, page: Path, verdict: Path) -> None:
    """Write ``verdict`` when the draft of ``evaluation`` (evaluate.json) has passed; ``page`` is where all of it is drawn.

    Raises :class:`DraftsmithError` with the likely causes when the acceptance length is below
    ``evaluate.min_acceptance_length``.
    """
    report = read_json(evaluation)
    length, minimum, causes = report["acceptance_length"], report["gate"]["minimum"], report["gate"]["causes"]
    if not report["gate"]["passed"]:
        reasons = "".join(f"\n  - {cause}" for cause in causes) or "\n  - none found: train on more data or for longer"
        raise DraftsmithError(
            f"acceptance length {length:.2f} is below evaluate.min_acceptance_length ({minimum}), see {page}; likely causes:{reasons}"
        )
    log(f"gate: acceptance length {length:.2f}, at least {minimum:g} was asked for")
    write_json(verdict, {"acceptance_length": length, "minimum": minimum})
