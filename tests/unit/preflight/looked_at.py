"""Shared by the tests of the checks: the type of the fixture ``make``, a table of rows, a spoilt config."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from draftsmith import store
from draftsmith.preflight.subject import Subject

Make = Callable[..., Subject]


def write_rows(path: Path, rows: Sequence[Sequence[int]]) -> Path:
    """rows.parquet with the columns that the checks and the extraction read."""
    pd.DataFrame(
        {
            "row_id": [store.row_id(row) for row in rows],
            "input_ids": [np.array(row, dtype=np.int32) for row in rows],
            "length": [len(row) for row in rows],
            "span_starts": [[1] for _ in rows],
            "span_ends": [[len(row)] for row in rows],
        }
    ).to_parquet(path)
    return path


def change_config(folder: Path, **keys: Any) -> None:
    """Change keys of the model's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
