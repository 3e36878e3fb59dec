"""What the page shows of draft lengths, temperatures and requests in flight, and that it shows nothing where none was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftsmith.config import Config
from draftsmith.report.data import Gathered
from draftsmith.report.sections import evaluation, evaluation_sweep


def served(k: int, temperature: float, accepted: int, equal: bool | None) -> dict[str, Any]:
    return {
        "k": k, "temperature": temperature, "drafts": 100, "accepted": accepted, "acceptance_length": 1 + accepted / 100, "speedup": 1.25,
        "tokens_per_second": {"plain": 40.0, "draft": 50.0}, "outputs_equal": equal, "per_position": [accepted / 100 / k] * k,
        "per_domain": {"chat": {"acceptance_length": 1.5}, "code": {"acceptance_length": 2.5}},
    }  # fmt: skip


REPORT = {
    "sweep": [served(1, 0, 60, True), served(1, 1, 40, None), served(2, 0, 90, False), served(2, 1, 50, None)],
    "concurrency": [
        {"requests": 8, "tokens_per_second": {"plain": 300.0, "draft": 330.0}, "speedup": 1.1},
        {"requests": 1, "tokens_per_second": {"plain": 50.0, "draft": 100.0}, "speedup": 2.0},
    ],
}  # fmt: skip


def cells(rows: Any) -> list[list[str]]:
    return [[str(cell) for cell in row] for row in rows]


def test_acceptance_is_drawn_by_k_a_curve_for_each_temperature() -> None:
    lengths, _ = evaluation_sweep.draw(REPORT)
    assert lengths.figure is not None
    assert lengths.table is not None
    assert {trace["name"]: (trace["x"], trace["y"]) for trace in lengths.figure["data"]} == {
        "temperature 0": ([1, 2], [1.6, 1.9]), "temperature 1": ([1, 2], [1.4, 1.5]),
    }  # fmt: skip
    assert cells(lengths.table.rows)[2] == ["2", "0", "100", "90", "1.90", "50.0 tokens/s", "1.25 ×", "no"]  # noqa: RUF001
    assert [row[-1].why for row in lengths.table.rows] == ["", "only greedy answers can be compared"] * 2  # type: ignore[union-attr]


def test_a_draft_length_is_a_whole_number_on_the_axis_too() -> None:
    """Of two lengths plotly would make an axis with 1.2, 1.4, 1.6 and 1.8 between them."""
    for report, ticks in ((REPORT, [1, 2]), ({"sweep": [served(3, 0, 60, True), served(3, 1, 50, None)]}, [3])):
        lengths = evaluation_sweep.draw(report)[0]
        assert lengths.figure is not None
        assert lengths.figure["layout"]["xaxis"]["tickvals"] == ticks


def test_seven_temperatures_have_seven_colours() -> None:
    sweep = [served(k, place / 4, 50, None) for k in (1, 2) for place in range(7)]
    lengths = evaluation_sweep.draw({"sweep": sweep})[0]
    assert lengths.figure is not None
    assert len({trace["line"]["color"] for trace in lengths.figure["data"]}) == len(lengths.figure["data"]) == 7


def test_positions_and_domains_of_each_draft_length() -> None:
    positions, domains = evaluation_sweep.tables(REPORT)
    assert positions.head == ["Draft length k", "Temperature", "Position 1", "Position 2"]
    assert cells(positions.rows)[0][2:] == ["60.0%", "–"]  # noqa: RUF001
    assert cells(positions.rows)[3][2:] == ["25.0%", "25.0%"]
    assert domains.head[2:] == ["chat", "code"]
    assert cells(domains.rows)[1] == ["1", "1", "1.50", "2.50"]


def test_speed_by_requests_in_flight() -> None:
    _, speed = evaluation_sweep.draw(REPORT)
    assert speed.figure is not None
    assert speed.table is not None
    assert {trace["name"]: (trace["x"], trace["y"]) for trace in speed.figure["data"]} == {
        "target alone": ([1, 8], [50, 300]), "with the draft": ([1, 8], [100, 330]),
    }  # fmt: skip
    assert cells(speed.table.rows)[0] == ["1", "50.0 tokens/s", "100 tokens/s", "2.00 ×"]  # noqa: RUF001


def test_nothing_is_shown_where_nothing_was_measured() -> None:
    for report in ({}, {"sweep": [], "concurrency": []}, {"sweep": [{}], "concurrency": ["?"]}):
        assert evaluation_sweep.draw(report) == []
        assert evaluation_sweep.tables(report) == []


def test_the_section_has_them_beside_the_rest(tmp_path: Path) -> None:
    with_both = evaluation.section(Gathered(Config(), tmp_path, {"evaluate_draft": REPORT}))
    without = evaluation.section(Gathered(Config(), tmp_path, {"evaluate_draft": {}}))
    assert [chart.id for chart in with_both.charts] == [
        *(chart.id for chart in without.charts),
        "acceptance-by-k",
        "concurrency",
    ]
    assert len(with_both.tables) == len(without.tables) + 2
