"""What Snakemake's own log adds: steps, the queue, and failures of jobs that never came to speak."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from draftsmith.status import snakemake_log, status
from draftsmith.status.table import below

_LOCAL = """\
Building DAG of jobs...
[Mon Nov 30 01:00:00 2026]
rule extract_shard:
    input: results/demo/target.json
    log: logs/demo/extract_shard/1-of-2.log
    jobid: 7
    wildcards: scatteritem=1-of-2
[Mon Nov 30 01:00:00 2026]
rule extract_shard:
    input: results/demo/target.json
    log: logs/demo/extract_shard/2-of-2.log
    jobid: 8
    wildcards: scatteritem=2-of-2
[Mon Nov 30 01:10:00 2026]
Finished jobid: 7 (Rule: extract_shard)
6 of 12 steps (50%) done
[Mon Nov 30 01:11:00 2026]
Error in rule extract_shard:
    message: None
    jobid: 8
    log: logs/demo/extract_shard/2-of-2.log (check log file(s) for error details)
"""
_SLURM = """\
Job 2 has been submitted with SLURM jobid 101 (log: /w/logs/slurm/rule_get_target/101.log).
Finished jobid: 2 (Rule: get_target)
1 of 13 steps (8%) done
Job 7 has been submitted with SLURM jobid 102 (log: /w/logs/slurm/rule_extract_shard/1-of-2/102.log).
Job 8 has been submitted with SLURM jobid 103 (log: /w/logs/slurm/rule_extract_shard/2-of-2/103.log).
Error in rule extract_shard:
    message: SLURM-job '103' failed, SLURM status is: 'OUT_OF_MEMORY'.
    jobid: 8
"""


def written(root: Path, text: str, name: str = "2026-11-30T010000.000000", age: float = 0.0) -> Path:
    (root / "results/demo").mkdir(parents=True, exist_ok=True)
    path = root / ".snakemake/log" / f"{name}.snakemake.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def states(root: Path) -> dict[str, str]:
    return {job.name: job.state for job in status(root / "results/demo").jobs}


def test_a_job_that_failed_before_it_could_speak(tmp_path: Path) -> None:
    path = written(tmp_path, _LOCAL)
    found = status(tmp_path / "results/demo")
    assert found.snakemake is not None
    assert (found.snakemake.finished, found.snakemake.total, found.snakemake.active) == (6, 12, True)
    failed = next(job for job in found.jobs if job.item == "2-of-2")
    assert (failed.state, failed.failures[0].line, failed.failures[0].where) == (
        "failed",
        "Error in rule extract_shard",
        str(path),
    )


def test_a_retry_is_no_failure(tmp_path: Path) -> None:
    again = "Trying to restart job 8.\nrule extract_shard:\n    log: logs/demo/extract_shard/2-of-2.log\n    jobid: 8\n    wildcards: scatteritem=2-of-2\n"
    written(tmp_path, _LOCAL + again)
    assert states(tmp_path)["extract_shard 2-of-2"] == "waiting"


def test_jobs_in_slurms_queue(tmp_path: Path) -> None:
    written(tmp_path, _SLURM)
    found = {job.name: job for job in status(tmp_path / "results/demo").jobs}
    assert (found["extract_shard 1-of-2"].state, found["extract_shard 1-of-2"].slurm_job) == ("queued", "102")
    assert found["extract_shard 2-of-2"].state == "failed"
    assert (
        found["extract_shard 2-of-2"].failures[0].line
        == "Error in rule extract_shard: SLURM-job '103' failed, SLURM status is: 'OUT_OF_MEMORY'."
    )
    # Its submission has ended; without an output it waits.
    assert found["get_target"].state == "waiting"


def test_logs_of_other_runs_are_passed_over(tmp_path: Path) -> None:
    written(tmp_path, _LOCAL)
    written(tmp_path, _LOCAL.replace("demo", "other"), "2026-11-30T020000.000000")
    log = snakemake_log.read(tmp_path, "demo")
    assert log is not None
    assert "T010000" in log.summary.log
    # A log of Slurm's names no run: with several here it is nobody's.
    (tmp_path / "results/other").mkdir()
    written(tmp_path, _SLURM, "2026-11-30T030000.000000")
    log = snakemake_log.read(tmp_path, "demo")
    assert log is not None
    assert log.queued == {}


# Logs of `snakemake --report`, which names what it adds, and of a run that finds all done: no job of the run is in them.
_REPORT = """\
Building DAG of jobs...
Creating report...
Missing metadata for file results/demo/target.json.
Adding report.html (2 MB).
"""
_NOTHING = """\
  Command: snakemake --configfile results/demo/mine.yaml
Building DAG of jobs...
Nothing to be done (all requested files are present and up to date).
"""


def test_other_commands_in_the_folder_leave_the_runs_log_alone(tmp_path: Path) -> None:
    """However many of them there were since."""
    path = written(tmp_path, _LOCAL, age=3600)
    for place in range(12):
        written(
            tmp_path, (_REPORT, _NOTHING, "Unlocked working directory.\n")[place % 3], f"2026-11-30T0201{place:02}.0"
        )
    found = status(tmp_path / "results/demo")
    assert found.snakemake is not None
    assert (found.snakemake.log, found.snakemake.finished, found.snakemake.total) == (str(path), 6, 12)
    assert below(found)[-1].startswith("Snakemake has ended: 6 of 12 steps done")


def test_a_run_that_reads_from_this_one_is_another(tmp_path: Path) -> None:
    path = written(tmp_path, _LOCAL)
    other = _LOCAL.replace("demo", "second").replace("results/second/target.json", "results/demo/draft/config.json")
    written(tmp_path, other, "2026-11-30T020000.000000")
    log = snakemake_log.read(tmp_path, "demo")
    assert log is not None
    assert log.summary.log == str(path)


def test_the_logs_of_failed_jobs_do_not_hide_whose_run_it_is(tmp_path: Path) -> None:
    """Snakemake shows them within its own; here longer than all that it says itself."""
    path = written(tmp_path, _LOCAL + "a line of a log\n" * 20_000 + "Complete log(s): x\n")
    log = snakemake_log.read(tmp_path, "demo")
    assert log is not None
    assert (log.summary.log, log.summary.total) == (str(path), 12)
    assert log.failed == {("extract_shard", "2-of-2"): "Error in rule extract_shard"}


# What Snakemake shows of a failed job on Slurm, whose own Snakemake has ended; then it goes on.
_FAREWELL = (
    "Shutting down, this might take some time.\nExiting because a job execution failed. Look above for error messages\n"
)
_AGAIN = "Trying to restart job 8.\nSelect jobs to execute...\nJob 8 has been submitted with SLURM jobid 104 (log: /w/logs/slurm/rule_extract_shard/2-of-2/104.log).\n"
_END = "Complete log(s): x\n"


@pytest.mark.parametrize(
    ("text", "age", "locked", "active", "said"),
    [
        (_LOCAL, 0, False, True, "is at work"),
        (_LOCAL, 3600, False, False, "has ended"),
        (_LOCAL + _END, 0, True, False, "has ended"),
        (_LOCAL + _FAREWELL, 0, True, True, "is at work"),
        (_SLURM + _FAREWELL + _AGAIN, 0, True, True, "is at work"),
        # A long job writes nothing to the log for hours, but the lock is held.
        (_SLURM + _FAREWELL + _AGAIN, 3600, True, True, "is at work"),
        (_SLURM + _FAREWELL + _AGAIN + _FAREWELL + _END, 0, True, False, "has ended"),
        (_LOCAL, 3600, True, False, "was killed, or says nothing (its lock is still there"),
    ],
)  # fmt: skip
def test_whether_snakemake_is_at_work(
    tmp_path: Path, text: str, age: float, locked: bool, active: bool, said: str
) -> None:
    written(tmp_path, text, age=age)
    if locked:
        (tmp_path / ".snakemake/locks").mkdir()
        (tmp_path / ".snakemake/locks/0.input.lock").touch()
    found = status(tmp_path / "results/demo")
    assert found.snakemake is not None
    assert found.snakemake.active is active
    assert found.over is not active
    assert below(found)[-1].startswith(f"Snakemake {said}")
