"""The last lines of `make demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftsmith.headline import headline

EVALUATION: dict[str, Any] = {
    "k": 3,
    "prompts": 48,
    "acceptance_length": 1.6449,
    "untrained": {"acceptance_length": 1.0},
}


def test_with_an_untrained_draft() -> None:
    assert headline(Path("results/demo"), EVALUATION).splitlines() == [
        "draft:  results/demo/draft",
        "report: results/demo/report.html",
        "acceptance length: 1.64 (k = 3, 48 held-out prompts; untrained draft 1.00)",
    ]


@pytest.mark.parametrize("evaluation", [EVALUATION | {"untrained": None}])
def test_without(evaluation: dict[str, Any]) -> None:
    last = headline(Path("results/demo"), evaluation).splitlines()[-1]
    assert last == "acceptance length: 1.64 (k = 3, 48 held-out prompts)"
