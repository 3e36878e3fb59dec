"""An error is told with all that is known of it, whoever raised it and however empty its text."""

from __future__ import annotations

from pathlib import Path

from draftsmith.extract_shard import ledger


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_an_empty_text_keeps_type_and_traceback(tmp_path: Path) -> None:
    entry = ledger.record(tmp_path, raised(AssertionError()), rank=1, stage="step", rows=list("abcdefg"))
    assert ledger.read(tmp_path) == [entry]
    text = ledger.text(entry)
    assert text.startswith("--- AssertionError (stage step, rank 1, rows a, b, c, d, e and 2 more) ---\nTraceback")
    assert text.endswith("raise error\nAssertionError")


def test_the_cause_of_an_error_is_kept() -> None:
    try:
        try:
            raise KeyError("model.layers.3")
        except KeyError as cause:
            raise RuntimeError from cause
    except RuntimeError as error:
        text = ledger.text(ledger.describe(error))
    assert "KeyError: 'model.layers.3'" in text
    assert "direct cause" in text


def test_the_earliest_error_is_the_last_that_is_read() -> None:
    first, echo = (ledger.describe(raised(error), stage="step") for error in (ValueError("cause"), OSError("echo")))
    assert ledger.cause_last([first, echo]).splitlines()[-1] == "ValueError: cause"


def test_a_disk_that_takes_no_ledger_is_no_second_error(tmp_path: Path) -> None:
    (tmp_path / ".ledger").write_text("a file where the folder should be")
    assert ledger.keep(tmp_path, [], ["a"]) is None
