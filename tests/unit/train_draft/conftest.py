"""A run folder to train in."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import training_run


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., training_run.RunFolder]:
    """:func:`training_run.make` in the test's own folder."""
    return partial(training_run.make, tmp_path)
