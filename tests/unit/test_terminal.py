"""Numbers as people read them."""

from __future__ import annotations

import pytest

from draftsmith import terminal


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (57_344, "57.3 kB"), (3.4e9, "3.4 GB"), (2.5e15, "2,500.00 TB")],
)
def test_bytes(count: float, shown: str) -> None:
    assert terminal.size(count) == shown


def test_a_file_cuts_nothing_off(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert terminal.console().width == 1000


def test_a_width_that_is_named_holds_for_a_pipe_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert terminal.console().width == 80
