"""What a job says of itself: complete files, how it ended, and nothing at all where nobody asked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from draftsmith import progress_file
from draftsmith.errors import DraftsmithError
from draftsmith.gpus import nvml

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(progress_file.FOLDER, str(tmp_path))
    monkeypatch.setattr(progress_file, "_counted", -100.0)
    return tmp_path


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_a_job_lives_and_ends_well(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setattr(progress_file, "BEAT_SECONDS", 0.05)
    with progress_file.watched(["extract-shard", "--settings", "{}", "--scatteritem", "2-of-3"]):
        time.sleep(0.3)
        first = read(folder / "extract_shard.2-of-3.json")
        assert (first["stage"], first["item"], first["state"], first["ended"]) == (
            "extract_shard",
            "2-of-3",
            "running",
            None,
        )
        assert (first["pid"], first["slurm_job"]) == (os.getpid(), "77")
        time.sleep(0.3)
        assert read(folder / "extract_shard.2-of-3.json")["updated"] > first["updated"]
    last = read(folder / "extract_shard.2-of-3.json")
    assert (last["state"], last["error"]) == ("done", None)
    assert last["ended"] >= last["started"]
    assert list(folder.iterdir()) == [folder / "extract_shard.2-of-3.json"]


@pytest.mark.parametrize(
    ("error", "state", "line"),
    [
        (DraftsmithError("the first line\nthe second"), "failed", "the first line"),
        (ValueError("of the program\nand more"), "failed", "ValueError: of the program"),
        # What only announces the next line says nothing alone.
        (DraftsmithError("too low; likely causes:\n  - one\n  - two"), "failed", "too low; likely causes: one"),
        # An exception whose text is empty, which others print as nothing.
        (RuntimeError(), "failed", "RuntimeError"),
        (SystemExit(1), "failed", "SystemExit: 1"),
        (SystemExit(143), "stopped", None),
        (KeyboardInterrupt(), "stopped", None),
        (SystemExit(0), "done", None),
    ],
)  # fmt: skip
def test_how_a_job_ends(folder: Path, error: BaseException, state: str, line: str | None) -> None:
    with pytest.raises(type(error)), progress_file.watched(["train-draft"]):
        raise error
    told = read(folder / "train_draft.json")
    assert (told["state"], told["error"]) == (state, line)


def test_counts_are_written_now_and_then(folder: Path) -> None:
    with progress_file.watched(["train-draft"]):
        progress_file.report(1, 10, "steps", tokens_per_second=5.0)
        progress_file.report(2, 10, "steps")
        assert read(folder / "train_draft.counts.json")["done"] == 1
        progress_file.report(10, 10, "steps", failed=7, failures=[str(place) for place in range(7)], always=True)
        counts = read(folder / "train_draft.counts.json")
        assert (counts["done"], counts["failed"], counts["failures"]) == (10, 7, ["0", "1", "2", "3", "4"])
    # Nobody is watched any more.
    progress_file.report(3, 10, "steps", always=True)
    assert read(folder / "train_draft.counts.json")["done"] == 10


def test_a_process_that_the_job_has_started_counts_for_it(folder: Path) -> None:
    code = "from draftsmith import progress_file; progress_file.report(4, 8, 'prompts')"
    with progress_file.watched(["evaluate-draft"]):
        subprocess.run(
            [sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": str(REPO / "workflow")}
        )
        assert read(folder / "evaluate_draft.counts.json")["done"] == 4
    assert read(folder / "evaluate_draft.json")["state"] == "done"


def test_a_rank_that_the_job_has_started_has_no_life_of_its_own(folder: Path) -> None:
    """torchrun starts the stage's very command once more on each GPU."""
    with progress_file.watched(["train-draft"]):
        with progress_file.watched(["train-draft", "--scatteritem", "rank"]):
            pass
        progress_file.report(3, 9, "step", always=True)
    assert read(folder / "train_draft.counts.json")["done"] == 3
    assert sorted(path.name for path in folder.iterdir()) == ["train_draft.counts.json", "train_draft.json"]


@pytest.mark.parametrize("arguments", [[], ["--help"], ["status"], ["estimate", "--config", "x"], ["store", "stats"]])
def test_what_is_no_stage_leaves_nothing(folder: Path, arguments: list[str]) -> None:
    with progress_file.watched(arguments):
        pass
    assert list(folder.iterdir()) == []


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(progress_file.FOLDER, raising=False)
    monkeypatch.chdir(tmp_path)
    before = threading.active_count()
    with progress_file.watched(["tokenize"]):
        progress_file.report(1, 2, "rows", always=True)
        assert threading.active_count() == before
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_harms_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(progress_file.FOLDER, str(tmp_path / "file" / "below"))
    with progress_file.watched(["tokenize"]):
        progress_file.report(1, 2, "rows", always=True)


def test_the_gpus_of_the_job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = nvml.Device(None, "3", "GPU-x")
    monkeypatch.setattr(nvml, "devices", lambda: [device])
    monkeypatch.setattr(nvml, "name", lambda given: "NVIDIA H200")
    monkeypatch.setattr(nvml, "memory", lambda given: (100, 40))
    with progress_file.watched(["dry-run"]):
        pass
    # Without a driver nobody tells how busy it is.
    assert read(folder / "dry_run.json")["gpus"] == [
        {"index": "3", "name": "NVIDIA H200", "used": 40, "total": 100, "busy": None}
    ]


def test_a_driver_that_does_not_answer_harms_nobody(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[nvml.Device]:
        raise DraftsmithError("the driver is being restarted")

    monkeypatch.setattr(nvml, "devices", broken)
    with progress_file.watched(["dry-run"]):
        pass
    assert read(folder / "dry_run.json")["gpus"] == []


def test_a_forked_child_neither_waits_nor_speaks_for_the_job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_file, "BEAT_SECONDS", 0.001)
    with progress_file.watched(["train-draft"]):
        for _ in range(30):
            child = os.fork()
            if not child:
                # A lock that was held while it was born would never be let go here.
                got = progress_file._beating.acquire(timeout=5)
                os._exit(0 if got else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert read(folder / "train_draft.json")["state"] == "done"


def test_a_command_that_is_killed_leaves_its_last_sign_of_life(tmp_path: Path) -> None:
    code = (
        "import sys, time; from draftsmith import progress_file\n"
        "with progress_file.watched(['tokenize']):\n    time.sleep(1); print('up', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(REPO / "workflow"), progress_file.FOLDER: str(tmp_path)},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    told = read(tmp_path / "tokenize.json")
    assert (told["state"], told["pid"]) == ("running", process.pid)


def test_a_rules_command_writes_them(tmp_path: Path) -> None:
    """The command line as a rule calls it, here one that fails at once; its log is where standard error goes."""
    with open(tmp_path / "rule.log", "w") as log:
        done = subprocess.run(
            [sys.executable, "-m", "draftsmith", "merge-manifest", "--rows", "none.parquet", "--manifest", "m.json", "shard.json"],
            stderr=log, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(REPO / "workflow"), progress_file.FOLDER: str(tmp_path / "progress")},
        )  # fmt: skip
    assert done.returncode == 1
    told = read(tmp_path / "progress" / "merge_manifest.json")
    assert told["state"] == "failed"
    assert told["error"].startswith("shard.json: no such file")
    assert told["log"] == str(tmp_path / "rule.log")
