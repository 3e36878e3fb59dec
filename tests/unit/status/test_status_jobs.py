"""The state of each job, in a made-up results tree: from signs of life, from outputs, from logs."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from draftsmith.processes import pid_namespace
from draftsmith.status import find, status, table
from draftsmith.status.model import Job, Status


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "results" / "demo").mkdir(parents=True)
    return tmp_path


def put(path: Path, content: Any, age: float = 0.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def life(root: Path, stage: str, item: str | None = None, **more: Any) -> Path:
    """A job's own file: of this very process, just now, unless said otherwise."""
    now = time.time()
    values: dict[str, Any] = {
        "format": 1, "stage": stage, "item": item, "state": "running", "pid": os.getpid(), "pid_started": psutil.Process().create_time(),
        "pid_namespace": pid_namespace(), "host": socket.gethostname(), "slurm_job": None, "started": now - 100, "ended": None, "error": None,
        "log": None, "beat_seconds": 5.0, "updated": now, "gpus": [],
    }  # fmt: skip
    return put(root / "logs/demo/progress" / f"{stage}{f'.{item}' if item else ''}.json", values | more)


def counts(root: Path, name: str, **more: Any) -> None:
    values = {
        "format": 1, "time": time.time(), "done": 5, "total": 20, "unit": "rows", "phase": None, "tokens": 500, "tokens_per_second": 50.0,
        "seconds_left": 30.0, "batches": 2, "bytes": 1000, "failed": 0, "failures": [],
    }  # fmt: skip
    put(root / "logs/demo/progress" / f"{name}.counts.json", values | more)


def job(root: Path, stage: str, item: str | None = None) -> Job:
    return next(each for each in told(root).jobs if each.stage == stage and (item is None or each.item == item))


def told(root: Path) -> Status:
    return status(root / "results" / "demo")


def test_nothing_has_begun(root: Path) -> None:
    found = told(root)
    assert {each.state for each in found.jobs} == {"waiting"}
    names = [each.name for each in found.jobs]
    assert names[0] == "get_target"
    assert names[-2:] == ["report", "gate"]
    # It is a part of runs that the config asks for alone.
    assert not {"regenerate", "merge_answers"} & set(names)
    assert found.over


def test_a_job_that_runs(root: Path) -> None:
    gpu = {"index": "0", "name": "NVIDIA H200", "used": 80 * 2**30, "total": 139 * 2**30, "busy": 97}
    life(root, "extract_shard", "1-of-1", gpus=[gpu], slurm_job="12")
    counts(root, "extract_shard.1-of-1")
    found = job(root, "extract_shard")
    assert found.state == "running"
    assert (found.done, found.total, found.unit, found.batches, found.tokens_per_second, found.seconds_left) == (
        5,
        20,
        "rows",
        2,
        50.0,
        30.0,
    )
    assert found.seconds == pytest.approx(100, abs=5)
    assert (found.slurm_job, found.gpus[0].busy) == ("12", 97)
    assert not told(root).over
    assert table.work(found) == "5/20 rows (25%), 2 batches, 1.0 kB"
    assert table.gpus(found) == "80/139 GiB, 97 % busy"
    line = next(line for line in table.plain(told(root)) if line.startswith("extract_shard"))
    assert line.startswith(
        "extract_shard 1-of-1: running, 5/20 rows (25%), 2 batches, 1.0 kB, 50 tokens/s, 30 s left, 1 min 4"
    )


def test_a_load_has_a_phase_and_no_counts(root: Path) -> None:
    life(root, "extract_shard", "1-of-1")
    counts(root, "extract_shard.1-of-1", done=None, total=None, batches=None, bytes=None, phase="loading the engine")
    assert table.work(job(root, "extract_shard")) == "loading the engine"


def test_done_by_its_own_word_and_by_its_output(root: Path) -> None:
    now = time.time()
    put(root / "results/demo/train/train.json", {"steps": 40, "tokens": 900, "tokens_per_second": 12.5}, age=5)
    life(root, "train_draft", state="done", started=now - 70, ended=now - 10)
    found = job(root, "train_draft")
    assert (found.state, found.done, found.tokens_per_second) == ("done", 40, 12.5)
    assert found.seconds == pytest.approx(60, abs=1)
    # A run that left no signs of life: Snakemake's benchmark tells what it took.
    put(root / "results/demo/tokenize/tokenize.json", {"rows": 7, "tokens": 70}, age=5)
    put(root / "benchmarks/rules/demo/tokenize.tsv", "s\th:m:s\n12.5\t0:00:12\n")
    before = job(root, "tokenize")
    assert (before.state, before.done, before.tokens, before.seconds) == ("done", 7, 70, 12.5)


def test_what_was_removed_will_run_again(root: Path) -> None:
    life(root, "train_draft", state="done", ended=time.time())
    assert job(root, "train_draft").state == "waiting"


def test_failed_with_the_first_line_and_the_place_of_the_whole(root: Path) -> None:
    life(
        root,
        "evaluate_draft",
        state="failed",
        error="acceptance length 1.28 is below 1.4",
        ended=time.time(),
        log="/elsewhere/evaluate_draft.log",
    )
    found = job(root, "evaluate_draft")
    assert found.state == "failed"
    assert [(each.line, each.where) for each in found.failures] == [
        ("acceptance length 1.28 is below 1.4", "/elsewhere/evaluate_draft.log")
    ]
    assert (
        "evaluate_draft: acceptance length 1.28 is below 1.4\n    the whole: /elsewhere/evaluate_draft.log"
        in table.below(told(root))
    )


def test_stopped_in_good_order(root: Path) -> None:
    life(root, "extract_shard", "1-of-1", state="stopped", ended=time.time())
    assert job(root, "extract_shard").state == "stopped"


def test_killed_on_this_machine_is_seen_at_once(root: Path) -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    life(root, "train_draft", pid=child, pid_started=time.time() - 50)
    counts(root, "train_draft", unit="steps")
    found = job(root, "train_draft")
    assert found.state == "killed"
    # What it had done stays visible, a time left is not.
    assert (found.done, found.seconds_left) == (5, None)
    assert f"process {child} on {socket.gethostname()} is gone" in found.failures[0].line
    assert told(root).over


def test_a_pid_that_has_passed_to_another_process(root: Path) -> None:
    life(root, "train_draft", pid_started=psutil.Process().create_time() - 1000)
    assert job(root, "train_draft").state == "killed"


@pytest.mark.parametrize(("age", "state"), [(30, "running"), (110, "running"), (130, "killed"), (-60, "running")])
def test_on_another_machine_the_age_decides(root: Path, age: float, state: str) -> None:
    """Its pid says nothing here; clocks may differ, and a network file system shows a file late."""
    life(root, "train_draft", host="node17", pid=2**22, updated=time.time() - age)
    assert job(root, "train_draft").state == state


def test_in_another_container_of_this_host_the_age_decides(root: Path) -> None:
    life(root, "train_draft", pid=2**22, pid_namespace="pid:[1]")
    assert job(root, "train_draft").state == "running"


def test_a_retry_that_runs_after_a_failure(root: Path) -> None:
    """Its output of an earlier day is older than its start; counts of the earlier try are no counts of this one."""
    put(root / "results/demo/train/train.json", {"steps": 40}, age=1000)
    life(root, "train_draft")
    counts(root, "train_draft", time=time.time() - 500)
    found = job(root, "train_draft")
    assert (found.state, found.done) == ("running", None)


@pytest.mark.parametrize(
    "text", ["", "{", '{"format": 1, "state": "run', "[]", '{"format": 1}', '{"format": 2, "started": 1}', "\x00" * 20]
)
def test_half_written_files_are_passed_over(root: Path, text: str) -> None:
    put(root / "logs/demo/progress/train_draft.json", text)
    put(root / "logs/demo/progress/train_draft.counts.json", text)
    put(root / "results/demo/tokenize/tokenize.json", text, age=5)
    assert job(root, "train_draft").state == "waiting"
    # It is there, which is what Snakemake goes by; what it says of its work is left out.
    assert (job(root, "tokenize").state, job(root, "tokenize").done) == ("done", None)


def test_counts_of_another_shape_are_passed_over(root: Path) -> None:
    life(root, "train_draft")
    counts(root, "train_draft", done="many", failures="none")
    assert (job(root, "train_draft").state, job(root, "train_draft").done) == ("running", None)


def test_rows_that_failed(root: Path) -> None:
    life(root, "extract_shard", "1-of-1", log="/run/1-of-1.log")
    counts(root, "extract_shard.1-of-1", failed=2, failures=["ValueError: the states of a token are all zero"])
    found = job(root, "extract_shard")
    assert found.failed == 2
    assert [(each.line, each.where) for each in found.failures] == [
        ("ValueError: the states of a token are all zero", "/run/1-of-1.log")
    ]
    assert "2 failed" in table.work(found)


def test_shards_of_the_newest_split(root: Path) -> None:
    """One load yesterday, three today: the old one's files are still there."""
    put(root / "logs/demo/extract_shard/1-of-1.log", "old", age=90_000)
    put(root / "results/demo/extract/shards/1-of-1.json", {}, age=90_000)
    put(
        root / "results/demo/extract/shards/2-of-3.json",
        {"rows": {}, "figures": {"batches": 4, "tokens": 8, "tokens_per_second": 2.0}},
        age=10,
    )
    life(root, "extract_shard", "1-of-3")
    found = [(each.item, each.state, each.batches) for each in told(root).jobs if each.stage == "extract_shard"]
    assert found == [("1-of-3", "running", None), ("2-of-3", "done", 4), ("3-of-3", "waiting", None)]


def test_a_huge_manifest_is_not_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.status.files._MOST_BYTES", 100)
    put(
        root / "results/demo/extract/shards/1-of-1.json",
        {"rows": {str(place): [] for place in range(50)}, "figures": {"batches": 4}},
        age=5,
    )
    found = job(root, "extract_shard")
    assert (found.state, found.batches) == ("done", None)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("10:00:00 evaluate: plain\n10:00:01 error: too low\n  - a cause\n", "too low"),
        (
            "10:00:01 error: too low; likely causes:\n  - 6 of 20 prompts are alike\n  - another\n",
            "too low; likely causes: 6 of 20 prompts are alike",
        ),
        ("10:00:01 error: too low; likely causes:\n10:00:02 evaluate: over\n", "too low; likely causes:"),
        (
            "10:00:01 error: Traceback (most recent call last):\n  File 'x', line 1, in f\n    g()\nValueError: bad\nnot this\n",
            "ValueError: bad",
        ),
        (
            "10:00:01 error: Traceback (most recent call last):\n  File 'x', line 1, in f\n    g()\nValueError: \nat row 7\n",
            "ValueError: at row 7",
        ),
    ],
)  # fmt: skip
def test_by_its_log_where_it_said_nothing_itself(root: Path, text: str, line: str) -> None:
    log = put(root / "logs/demo/train_draft.log", text, age=3600)
    found = job(root, "train_draft")
    assert (found.state, [each.line for each in found.failures], found.failures[0].where) == (
        "failed",
        [line],
        str(log),
    )


def test_a_log_without_an_end(root: Path) -> None:
    put(root / "logs/demo/train_draft.log", "10:00:00 step 3/10\n", age=3600)
    assert job(root, "train_draft").state == "killed"
    put(root / "logs/demo/train_draft.log", "10:00:00 step 3/10\n")
    assert job(root, "train_draft").state == "running"


def test_what_a_failed_check_has_left(root: Path) -> None:
    put(root / "results/demo/failed-preflight.json", {"verdict": "fail"}, age=10)
    found = job(root, "preflight")
    assert (found.state, found.failures[0].where) == ("failed", str(root / "results/demo/failed-preflight.json"))


def test_the_run_that_was_written_to_last(root: Path) -> None:
    (root / "logs/slurm").mkdir(parents=True)
    put(root / "results/other/target.json", {})
    os.utime(root / "results/other", (1, 1))
    assert find(root) == root / "results" / "demo"
    life(root, "get_target")
    assert find(root) == root / "results" / "demo"
    # A first job has no results yet.
    (root / "logs/third/progress").mkdir(parents=True)
    os.utime(root / "logs/third/progress", (time.time() + 5, time.time() + 5))
    assert find(root).name == "third"


def test_every_rule_is_a_stage() -> None:
    from draftsmith.status.stages import STAGES

    rules = {path.stem for path in (Path(__file__).resolve().parents[3] / "workflow/rules").glob("*.smk")}
    assert {stage.name for stage in STAGES} == rules - {"common"}


def test_a_finished_job_has_the_figures_of_its_output(root: Path) -> None:
    """Its last words are of one of several servings, say; what it wrote is of them all."""
    life(root, "evaluate_draft", state="done", ended=time.time())
    counts(root, "evaluate_draft", done=16, total=16, unit="prompts", tokens_per_second=9.0)
    put(root / "results/demo/evaluate/evaluate.json", {"prompts": 48, "tokens_per_second": {"draft": 33.5}})
    found = job(root, "evaluate_draft")
    assert (found.state, found.done, found.total, found.tokens_per_second) == ("done", 48, 48, 33.5)


def test_shards_of_a_regeneration(root: Path) -> None:
    """They are a part of the run once something of them is to be seen, and so is what joins them."""
    life(root, "regenerate", "2-of-2")
    counts(root, "regenerate.2-of-2", done=3, total=7, unit="conversations")
    figures = {"tokens": 900, "tokens_per_second": 45.0}
    put(root / "results/demo/regenerate/shards/1-of-2.json", {"conversations": 6, "figures": figures})
    first, second = job(root, "regenerate", "1-of-2"), job(root, "regenerate", "2-of-2")
    assert (first.state, first.done, first.tokens, first.tokens_per_second) == ("done", 6, 900, 45.0)
    assert (second.state, second.done, second.total) == ("running", 3, 7)
    assert job(root, "merge_answers").state == "waiting"
    put(root / "results/demo/regenerate/regenerate.json", {"kept": 13, "answer_tokens": 1800})
    assert (job(root, "merge_answers").state, job(root, "merge_answers").done) == ("done", 13)
