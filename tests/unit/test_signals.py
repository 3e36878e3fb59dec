"""SIGTERM as a request, which comes by several ways."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from draftsmith import signals
from draftsmith.signals import Termination


@pytest.fixture
def before() -> Iterator[list[int]]:
    """Signals that reached who listened before."""
    reached: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, _: reached.append(number))
    yield reached
    signal.signal(signal.SIGTERM, previous)


def test_a_request_is_noted_and_goes_no_further(before: list[int]) -> None:
    with Termination() as termination:
        assert not termination.asked
        os.kill(os.getpid(), signal.SIGTERM)
        assert termination.asked
    assert before == []
    os.kill(os.getpid(), signal.SIGTERM)
    assert before == [signal.SIGTERM]


def test_the_same_request_by_another_way_ends_nothing(before: list[int]) -> None:
    """Slurm signals all processes of a job, and the first of them passes it on."""
    with Termination():
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
    assert before == []


def test_one_who_asks_again_later_is_heard(before: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    with Termination():
        os.kill(os.getpid(), signal.SIGTERM)
        now[0] += 4.9
        os.kill(os.getpid(), signal.SIGTERM)
        assert before == []
        now[0] += 0.2
        os.kill(os.getpid(), signal.SIGTERM)
        assert before == [signal.SIGTERM]
