"""dropped: counted by reason, and too many are an error."""

from __future__ import annotations

import pytest

from draftsmith.conversations.dropped import DropCount
from draftsmith.errors import DraftsmithError


def test_too_many_dropped() -> None:
    dropped = DropCount()
    dropped.check(0, 0.0)
    for place in range(3):
        dropped.add(f"f, line {place}", "unknown_role", "'x'")
    dropped.add("f, line 9", "duplicate")
    dropped.check(10, 0.3, ("duplicate",))
    with pytest.raises(
        DraftsmithError,
        match=r"4 of 10 conversations .*max_dropped_fraction \(0\.3\).*unknown_role 3 \(first: f, line 0: 'x'\); duplicate 1",
    ):
        dropped.check(10, 0.3)


def test_what_was_not_sampled_hides_no_faults() -> None:
    """Of 100 rows 90 are not sampled; 5 bad ones of the other 10 are half, not a twentieth."""
    dropped = DropCount()
    for place in range(90):
        dropped.add(f"f, line {place}", "not_sampled")
    for place in range(5):
        dropped.add(f"f, line {place}", "bad_message")
    dropped.check(100, 0.5)
    with pytest.raises(DraftsmithError, match=r"^5 of 10 conversations cannot be used"):
        dropped.check(100, 0.49)
