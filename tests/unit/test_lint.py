"""Formatters, linters and types have nothing to say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def complaints(command: list[str], folder: Path) -> str:
    """What a tool of this environment prints; empty when it is content."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        capture_output=True,
        text=True,
        env=os.environ | {"PATH": path, "NO_COLOR": "1"},
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["ruff", "check", "--quiet", "."], id="ruff-check"),
        pytest.param(["ruff", "format", "--check", "--quiet", "."], id="ruff-format"),
        pytest.param(["snakefmt", "--check", "Snakefile", "workflow"], id="snakefmt"),
        pytest.param(["mypy", "--no-error-summary"], id="mypy"),
        pytest.param(["snakemake", "--lint"], id="snakemake-lint"),
    ],
)
def test_the_tool_is_content(repo: Path, command: list[str]) -> None:
    assert complaints(command, repo) == ""
