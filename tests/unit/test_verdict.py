"""The verdict of checks: an error in one is a failed check, and keeps its traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith import verdict
from draftsmith.errors import DraftsmithError
from draftsmith.verdict import Check, Skip, conclude, made, table


def raising(error: Exception, cause: Exception | None = None) -> Any:
    def call() -> Any:
        raise error from cause

    return call


def test_what_a_check_may_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert made("a", lambda: ("warn", "much")) == Check(name="a", status="warn", detail="much")
    assert made("a", raising(Skip("no use"))) == Check(name="a", status="skip", detail="no use")
    assert made("a", raising(DraftsmithError("x; do y"))) == Check(name="a", status="fail", detail="x; do y")
    assert capsys.readouterr().err == ""


def test_an_unforeseen_error_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    """Its text alone may be empty."""
    check = made("a", raising(AssertionError()))
    assert (check.status, check.detail) == ("fail", "AssertionError; its traceback is above")
    assert check.traceback is not None
    assert "in call\n    raise error" in check.traceback
    assert check.traceback in capsys.readouterr().err
    with_cause = made("a", raising(DraftsmithError("refused"), KeyError("missing")))
    assert with_cause.detail == "refused"
    assert "KeyError: 'missing'" in str(with_cause.traceback)


def test_the_table_folds_what_is_long() -> None:
    checks = [Check(name="one", status="ok", detail="word " * 30), Check(name="second", status="fail", detail="no")]
    assert table("trial", checks) == [
        f"trial: ok    one     {' '.join(['word'] * 20)}",
        f"trial:               {' '.join(['word'] * 10)}",
        "trial: FAIL  second  no",
    ]


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [(["ok", "warn"], "ok"), (["skip"], "skipped"), (["ok", "skip"], "ok"), (["ok", "fail", "skip", "fail"], "fail")],
)
def test_the_conclusion(tmp_path: Path, statuses: list[Any], expected: str) -> None:
    report, beside = tmp_path / "trial.json", tmp_path / "failed-trial.json"
    beside.write_text("{}")
    checks = [Check(name=f"c{place}", status=status, detail=f"d{place}") for place, status in enumerate(statuses)]
    if expected == "fail":
        with pytest.raises(DraftsmithError) as error:
            conclude("trial", checks, report, 0.0, more=1)
        assert str(error.value) == "trial: c1: d1\ntrial: c3: d3"
        report = beside
    else:
        conclude("trial", checks, report, 0.0, more=1)
        assert not beside.exists()
    written = json.loads(report.read_text())
    assert written["verdict"] == expected
    assert written["more"] == 1
    assert written["checks"] == [
        {"name": f"c{place}", "status": status, "detail": f"d{place}"} for place, status in enumerate(statuses)
    ]


def test_a_long_error_is_one_line_that_ends() -> None:
    assert verdict.sentence(ValueError("a\n b")) == "ValueError: a b"
    assert verdict.sentence(NotImplementedError()) == "NotImplementedError"
    assert len(verdict.sentence(ValueError("x" * 5000))) < 400
