"""Axes in per cent: neighbouring ticks can be told apart, however small the range is."""

from __future__ import annotations

import re
from typing import Any

import pytest

from draftsmith.report import charts

SMALL = {"trained": [0.034, 0.012, 0.001]}
COLUMNS = charts.columns(["1", "2", "3"], SMALL, x="position", y="share", percent=True)
COMPARED = charts.compared(["1", "2", "3"], SMALL, x="share")
LINES = charts.lines({"trained": [(1, 0.95), (2, 0.97), (3, 0.975)]}, x="size", y="coverage", percent=True)


def written(value: float, form: str) -> str:
    """A tick as d3-format writes it: `.N` for decimals (6 if not given), `~` to leave out zeros at the end, `%`."""
    decimals, trimmed = re.fullmatch(r"(?:\.(\d+))?(~?)%", form).groups()  # type: ignore[union-attr]
    text = f"{100 * value:.{decimals or 6}f}"
    return (text.rstrip("0").rstrip(".") if trimmed else text) + "%"


@pytest.mark.parametrize("step", [0.2, 0.05, 0.01, 0.005, 0.002, 0.0005])
@pytest.mark.parametrize(("chart", "axis"), [(COLUMNS, "yaxis"), (COMPARED, "xaxis"), (LINES, "yaxis")])
def test_no_two_ticks_read_alike(chart: dict[str, Any], axis: str, step: float) -> None:
    labels = [written(place * step, chart["layout"][axis]["tickformat"]) for place in range(6)]
    assert len(set(labels)) == 6, labels
    assert labels[2] == f"{200 * step:g}%"
