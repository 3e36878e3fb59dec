"""preflight: everything that can fail early fails here, before a load of many minutes.

The static checks need no weights and take seconds. The dry run takes four rows through the whole path of extract_shard
with dummy weights and few layers, at the same tensor parallelism and with the same engine arguments.
"""

from __future__ import annotations

from pathlib import Path

from draftsmith import engine, hardware
from draftsmith.config import Config
from draftsmith.errors import DraftsmithError
from draftsmith.files import read_json, write_json
from draftsmith.layers import resolve_layers
from draftsmith.log import log
from draftsmith.preflight.checks import Check, static_checks
from draftsmith.preflight.dry_run import dry_run


def run(config: Config, *, target: Path, rows: Path, tokenize_report: Path, gpus: int | None, report: Path) -> None:
    """Make all checks, write them as JSON, and print them as a table.

    Raises :class:`DraftsmithError` that names each check that failed; the table is printed first.
    """
    described = read_json(target)
    described["layers"] = resolve_layers(config.target.layers, described["num_layers"])
    engine.check_granted(config, gpus)
    checks = static_checks(config, described, rows, read_json(tokenize_report))
    wanted = hardware.device() == "cuda" if config.preflight.dry_run is None else config.preflight.dry_run
    if wanted and all(check.status != "fail" for check in checks):
        checks.append(dry_run(config, described, rows))
    for line in table(checks):
        log(line)
    failed = [check for check in checks if check.status == "fail"]
    if failed:
        raise DraftsmithError("preflight: " + "; ".join(f"{check.name}: {check.detail}" for check in failed))
    write_json(report, {"verdict": "ok", "checks": [check.model_dump() for check in checks]})


def table(checks: list[Check]) -> list[str]:
    """The checks as lines of a table."""
    width = max(len(check.name) for check in checks)
    return [f"preflight: {check.status:<4}  {check.name:<{width}}  {check.detail}" for check in checks]
