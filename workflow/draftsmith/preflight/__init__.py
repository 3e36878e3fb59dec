"""preflight: everything that can be told without weights is told here, in seconds, before a load of many minutes.

Every check is made and shown, also when another one has failed; what only shows when the engine runs is left to dry_run.
"""

from __future__ import annotations

import time
from pathlib import Path

from draftsmith import engine, verdict
from draftsmith.config import Config
from draftsmith.files import read_json
from draftsmith.preflight.checks import static_checks
from draftsmith.preflight.subject import Subject


def run(config: Config, *, target: Path, rows: Path, tokenize_report: Path, gpus: int | None, report: Path) -> None:
    """Make all checks, print them as a table and write them as JSON.

    ``gpus`` is how many the scheduler granted; None when nobody was asked. Raises :class:`DraftsmithError` with a
    sentence for each check that failed.
    """
    begun = time.perf_counter()
    engine.prepare_environment(config)
    subject = Subject(config, read_json(target), rows, read_json(tokenize_report), gpus)
    verdict.conclude("preflight", static_checks(subject), report, begun)
