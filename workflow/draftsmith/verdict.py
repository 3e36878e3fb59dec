"""The verdict of a stage that checks: a table for people, JSON for programs, and a sentence for every check that failed."""

from __future__ import annotations

import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from draftsmith.errors import DraftsmithError
from draftsmith.files import write_json
from draftsmith.log import log

Status = Literal["ok", "warn", "fail", "skip"]
Found = tuple[Status, str]
# What stands out in a column of 'ok'.
_SHOWN = {"ok": "ok", "warn": "WARN", "fail": "FAIL", "skip": "skip"}
_WIDTH = 100
_LONGEST = 300


class Check(BaseModel):
    """One line of the table: ``detail`` is what was found, and the mend where it failed; ``traceback`` that of an error."""

    name: str
    status: Status
    detail: str
    traceback: str | None = None


class Skip(Exception):
    """Raised by a check that cannot be made; its text says why."""


def made(name: str, call: Callable[[], Found]) -> Check:
    """The check ``name`` by ``call``; an error in it is a failed check, so that the others are made all the same."""
    try:
        status, detail = call()
    except Skip as reason:
        return Check(name=name, status="skip", detail=str(reason))
    except DraftsmithError as error:
        return Check(
            name=name, status="fail", detail=str(error), traceback=_kept(name, error) if error.__cause__ else None
        )
    except Exception as error:
        detail = f"{sentence(error)}; its traceback is above"
        return Check(name=name, status="fail", detail=detail, traceback=_kept(name, error))
    return Check(name=name, status=status, detail=detail)


def _kept(name: str, error: Exception) -> str:
    """The traceback of an error, printed before the table."""
    text = "".join(traceback.format_exception(error)).rstrip()
    print(f"the check '{name}' raised\n{text}", file=sys.stderr, flush=True)
    return text


def sentence(error: BaseException) -> str:
    """Type and text of an error in one line."""
    text = shortened(str(error))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def shortened(text: str) -> str:
    """``text`` in one line, cut off where it becomes long."""
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"


def table(stage: str, checks: Sequence[Check]) -> list[str]:
    """The checks as lines of a table, long details folded."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        folded = textwrap.wrap(check.detail, _WIDTH, break_long_words=False, break_on_hyphens=False) or [""]
        head = f"{stage}: {_SHOWN[check.status]:<4}  {check.name:<{width}}  "
        lines += [head + folded[0], *(f"{stage}: {'':<{4 + 2 + width}}  {more}" for more in folded[1:])]
    return lines


def conclude(stage: str, checks: Sequence[Check], report: Path, begun: float, **more: Any) -> None:
    """Print the table and write ``report``; ``begun`` is when the stage began, by ``time.perf_counter``.

    Raises :class:`DraftsmithError` with a sentence for each check that failed. The report is then written beside
    ``report`` as ``failed-NAME``, since Snakemake deletes the output of a failed job.
    """
    for line in table(stage, checks):
        log(line)
    failed = [check for check in checks if check.status == "fail"]
    verdict = "fail" if failed else "skipped" if all(check.status == "skip" for check in checks) else "ok"
    beside = report.with_name(f"failed-{report.name}")
    write_json(
        beside if failed else report,
        {
            "verdict": verdict,
            "seconds": round(time.perf_counter() - begun, 1),
            "checks": [check.model_dump(exclude_none=True) for check in checks],
            **more,
        },
    )
    if failed:
        raise DraftsmithError("\n".join(f"{stage}: {check.name}: {check.detail}" for check in failed))
    beside.unlink(missing_ok=True)
