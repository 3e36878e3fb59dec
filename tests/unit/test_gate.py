"""The gate: a verdict where the minimum is reached, the causes where it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftsmith import gate
from draftsmith.errors import DraftsmithError
from draftsmith.files import read_json, write_json


def run(folder: Path, **said: Any) -> Path:
    write_json(
        folder / "evaluate.json",
        {"acceptance_length": 1.3, "gate": {"minimum": 1.3, "passed": True, "causes": []} | said},
    )
    gate.run(evaluation=folder / "evaluate.json", page=Path("results/a/report.html"), verdict=folder / "gate.json")
    return folder / "gate.json"


def test_a_draft_that_passes(tmp_path: Path) -> None:
    assert read_json(run(tmp_path)) == {"acceptance_length": 1.3, "minimum": 1.3}


@pytest.mark.parametrize(
    ("causes", "reasons"),
    [(["layer ids: other ones", "no head"], "  - layer ids: other ones\n  - no head"), ([], "  - none found: train on more data or for longer")],
)  # fmt: skip
def test_one_that_fails_names_the_causes_and_its_page(tmp_path: Path, causes: list[str], reasons: str) -> None:
    with pytest.raises(DraftsmithError) as failed:
        run(tmp_path, passed=False, minimum=2.0, causes=causes)
    assert str(failed.value) == (
        f"acceptance length 1.30 is below evaluate.min_acceptance_length (2.0), see results/a/report.html; likely causes:\n{reasons}"
    )
    assert not (tmp_path / "gate.json").exists()
