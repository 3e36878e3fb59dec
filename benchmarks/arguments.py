"""What a user gives a benchmark on its command line, checked before anything is measured."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import typer

from draftsmith.errors import DraftsmithError


def among(text: str, known: Collection[str], option: str) -> list[str]:
    """Names with commas between, each of which is ``known``."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise typer.BadParameter(f"{option}: {', '.join(unknown) or repr(text)} is none of {', '.join(known)}")
    return list(dict.fromkeys(names))


def numbers(text: str, option: str) -> list[int]:
    """Whole numbers above 0 with commas between."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{option}: {text!r} is no list of whole numbers above 0, as 3,7")
    return [int(part) for part in parts]


def mapping(text: str, option: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f'{option}: not valid JSON ({error}), as {{"learning_rate": 0.001}}') from None
    if not isinstance(values, dict):
        raise typer.BadParameter(f'{option}: {text!r} is no JSON object, as {{"learning_rate": 0.001}}')
    return values


def within(folder: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder of the call's own within ``folder``, of which nothing else is ever removed; two calls do not meet there."""
    folder.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(prefix="bench-", dir=folder.resolve())


def run(main: Callable[..., None]) -> None:
    """Call ``main`` with what the command line says; an error that the user can mend is one sentence."""
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    try:
        app()
    except DraftsmithError as error:
        sys.exit(str(error))
