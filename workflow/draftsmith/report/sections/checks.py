"""Checks as the stages write them: a name, a status and what was found."""

from __future__ import annotations

from typing import Any

from draftsmith.report.model import Cell, Table
from draftsmith.report.values import dig, text


def tables(caption: str, checks: list[Any], file: str) -> list[Table]:
    """One table of all checks of ``file``; none when there are no checks."""
    rows: list[list[Cell]] = [
        [text(dig(check, key), f"not in {file}") for key in ("name", "status", "detail")] for check in checks
    ]
    return [Table(caption, ["Check", "Status", "Found"], rows, numeric=3)] if rows else []
