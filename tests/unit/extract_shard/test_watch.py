"""The watch ends an engine that has failed and does not say so; with real processes in the place of the workers."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftsmith.extract_shard import ledger, watch
from draftsmith.extract_shard.watch import Watch

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    monkeypatch.setattr(watch, "_GRACE_SECONDS", 0.2)
    started = [subprocess.Popen(SLEEP) for _ in range(2)]
    yield started
    for process in started:
        process.kill()
        process.wait()


def watching(folder: Path, workers: list[subprocess.Popen[bytes]]) -> Watch:
    made = Watch(folder, {rank: process.pid for rank, process in enumerate(workers)}, interval=0.02)
    made.start()
    return made


def test_a_record_of_one_rank_ends_the_ranks_that_wait_for_it(
    tmp_path: Path, workers: list[subprocess.Popen[bytes]]
) -> None:
    made = watching(tmp_path, workers)
    time.sleep(0.1)
    assert all(worker.poll() is None for worker in workers), "as long as nothing is wrong nothing is ended"
    ledger.record(tmp_path, AssertionError(), rank=1, stage="step")
    assert [worker.wait(10) for worker in workers] == [-9, -9]
    made.stop()
    assert made.gone is None


def test_a_record_of_a_refused_row_ends_nothing(tmp_path: Path, workers: list[subprocess.Popen[bytes]]) -> None:
    made = watching(tmp_path, workers)
    ledger.record(tmp_path, ValueError("NaN"), rank=0, stage="validate", rows=["a"])
    ledger.record(tmp_path, ValueError("another token"), stage="publish", rows=["b"])
    time.sleep(0.6)
    assert made.is_alive()
    assert all(worker.poll() is None for worker in workers)
    ledger.record(tmp_path, OSError(5, "Input/output error"), rank=0, stage="write", rows=["c"])
    assert [worker.wait(10) for worker in workers] == [-9, -9]
    made.stop()


def test_a_rank_that_is_gone_without_a_record_is_named(tmp_path: Path, workers: list[subprocess.Popen[bytes]]) -> None:
    made = watching(tmp_path, workers)
    workers[1].kill()
    assert workers[0].wait(10) == -9
    made.stop()
    assert made.gone is not None
    assert (made.gone["type"], made.gone["rank"], made.gone["pid"]) == ("WorkerKilled", 1, workers[1].pid)


def test_a_driver_that_notices_by_itself_is_left_to_it(
    tmp_path: Path, workers: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_GRACE_SECONDS", 5.0)
    made = watching(tmp_path, workers)
    ledger.record(tmp_path, AssertionError(), rank=0, stage="step")
    time.sleep(0.1)
    made.stop()
    assert all(worker.poll() is None for worker in workers)


def test_what_does_not_end_in_time_is_ended(workers: list[subprocess.Popen[bytes]]) -> None:
    import psutil

    watch.end_all([psutil.Process(worker.pid) for worker in workers], seconds=0.1)
    assert not any(psutil.pid_exists(worker.pid) for worker in workers)
