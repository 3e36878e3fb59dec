"""Figures of an extraction that needed several starts of the engine."""

from __future__ import annotations

from draftsmith.extract_shard.driver import _add


def test_figures_of_starts_add_up() -> None:
    total = {"batches": 0, "seconds": 0.0}
    _add(
        total,
        {
            "batches": 3,
            "seconds": 1.5,
            "method": "native",
            "writer": {"ok": True, "steps": 7, "writer_seconds": {"copy": 0.5}},
        },
    )
    _add(
        total,
        {
            "batches": 2,
            "seconds": 0.25,
            "method": "native",
            "writer": {"ok": True, "steps": 2, "writer_seconds": {"copy": 0.25}},
        },
    )
    assert total == {
        "batches": 5, "seconds": 1.75, "method": "native", "writer": {"ok": True, "steps": 9, "writer_seconds": {"copy": 0.75}},
    }  # fmt: skip
