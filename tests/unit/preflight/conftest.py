"""A tiny model with a tokenizer, and a run of it that is looked at before its first load."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from looked_at import Make, write_rows

import tiny
from draftsmith import hardware
from draftsmith.config import parse
from draftsmith.preflight.subject import Subject


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of six layers; not to be changed."""
    return tiny.model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def model(llama: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may spoil."""
    return Path(shutil.copytree(llama, tmp_path / "model"))


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """What a check sets for vLLM does not outlive its test."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[hardware.Gpu]:
    """The GPUs of this machine, as the checks see them: those that a test puts into the list."""
    present: list[hardware.Gpu] = []
    monkeypatch.setattr(hardware, "gpus", lambda: tuple(present))
    return present


@pytest.fixture
def make(llama: Path, tmp_path: Path) -> Make:
    """Makes the run: ``rows`` are token ids, ``settings`` sections of the config, the rest are keys of target.json."""

    def made(
        folder: Path = llama, rows: Sequence[Sequence[int]] = ([1, 2, 3], [4, 5]), granted: int | None = 0,
        settings: dict[str, Any] | None = None, **target: Any,
    ) -> Subject:  # fmt: skip
        values: dict[str, Any] = {
            "engine": {"device": "cpu", "kv_cache_gib": 0.1},
            "target": {"layers": [1, 3, 5]},
            "extract": {"store": str(tmp_path / "store")},
        }
        for section, given in (settings or {}).items():
            values[section] = values.get(section, {}) | given
        described = tiny.target(folder, multimodal=False) | target
        table = write_rows(tmp_path / "rows.parquet", rows)
        return Subject(
            parse(values, "test"),
            described,
            table,
            {"tokens": 10, "supervised": 4, "by_split": {"evaluation": 2}},
            granted,
        )

    return made
