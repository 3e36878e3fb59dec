"""The command: JSON for machines, lines for pipes, a live table for people; it reads and does nothing else."""

from __future__ import annotations

import json
import os
import pty
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from draftsmith import status
from draftsmith.errors import DraftsmithError
from draftsmith.status.model import Status

REPO = Path(__file__).resolve().parents[3]
_WATCHED = """
import sys
from draftsmith.cli import app
try:
    app(sys.argv[1:])
except SystemExit as end:
    code = end.code
print(sorted({'torch', 'vllm', 'transformers', 'datasets', 'plotly', 'pandas', 'pynvml'} & set(sys.modules)), file=sys.stderr)
sys.exit(code)
"""
_ENVIRONMENT = os.environ | {"PYTHONPATH": str(REPO / "workflow")}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run that has come to its training, on a machine that is gone for good."""
    results = tmp_path / "results/demo"
    for name, content in {
        "target.json": {}, "tokenize/tokenize.json": {"rows": 3, "tokens": 30}, "preflight.json": {}, "clean_gpus.json": {}, "dry_run.json": {},
        "extract/shards/1-of-1.json": {"figures": {"batches": 2, "tokens": 30, "bytes": 900, "tokens_per_second": 3.0}},
        "extract/manifest.json": {"tokens": 30, "bytes": 900}, "vocabulary/vocabulary.json": {"size": 16},
    }.items():  # fmt: skip
        path = results / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    progress(tmp_path, state="failed", error="it has diverged", ended=time.time())
    return tmp_path


def progress(root: Path, **more: Any) -> None:
    values = {
        "format": 1, "stage": "train_draft", "item": None, "state": "running", "pid": 1, "pid_started": 1.0, "pid_namespace": "elsewhere",
        "host": "node17", "slurm_job": "5", "started": time.time() - 60, "ended": None, "error": None, "log": "/w/train_draft.log",
        "beat_seconds": 5.0, "updated": time.time(), "gpus": [],
    }  # fmt: skip
    folder = root / "logs/demo/progress"
    folder.mkdir(parents=True, exist_ok=True)
    # As a job does it: complete or absent.
    (folder / "new").write_text(json.dumps(values | more))
    os.replace(folder / "new", folder / "train_draft.json")


def command(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _WATCHED, "status", *arguments], capture_output=True, text=True, cwd=root, env=_ENVIRONMENT
    )  # fmt: skip


def listing(root: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in root.rglob("*")}


def test_json_of_its_schema_within_two_seconds_and_nothing_touched(root: Path) -> None:
    before, used = listing(root), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = command(root, "--json")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert listing(root) == before
    # Seconds of computing, as others may be at work here too.
    assert after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime < 2
    assert done.stderr.splitlines()[-1] == "[]"
    told = json.loads(done.stdout)
    jsonschema.validate(told, Status.model_json_schema())
    assert (told["name"], told["results"], told["snakemake"]) == ("demo", "results/demo", None)
    states = {job["stage"]: job["state"] for job in told["jobs"]}
    assert states == dict.fromkeys(
        ["get_target", "tokenize", "preflight", "clean_gpus", "dry_run", "extract_shard", "merge_manifest", "map_vocabulary"], "done"
    ) | {"look": "waiting", "train_draft": "failed", "export_draft": "waiting", "evaluate_draft": "waiting", "report": "waiting", "gate": "waiting"}  # fmt: skip
    training = next(job for job in told["jobs"] if job["stage"] == "train_draft")
    assert training["failures"] == [{"line": "it has diverged", "where": "/w/train_draft.log"}]


def test_lines_where_there_is_no_terminal(root: Path) -> None:
    done = command(root, "--results", "results/demo")
    lines = done.stdout.splitlines()
    assert "extract_shard 1-of-1: done, 2 batches, 900 B, 3 tokens/s" in lines
    assert lines[-2:] == ["train_draft: it has diverged", "    the whole: /w/train_draft.log"]
    assert "\x1b" not in done.stdout


def test_watch_tells_what_changes_and_ends_with_the_run(root: Path) -> None:
    progress(root)
    process = subprocess.Popen(
        [sys.executable, "-m", "draftsmith", "status", "--watch", "--every", "0.2"], stdout=subprocess.PIPE, text=True, cwd=root,
        env=_ENVIRONMENT,
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("train_draft: running"):
            break
    progress(root, state="failed", error="it has diverged", ended=time.time())
    rest = process.communicate(timeout=60)[0]
    assert process.returncode == 0
    assert "train_draft: failed" in rest
    # What has not changed is not told again.
    assert "get_target" not in rest


@pytest.mark.parametrize("named", [True, False])
def test_watch_waits_for_a_run_that_is_not_there_yet(
    root: Path, tmp_path_factory: pytest.TempPathFactory, named: bool
) -> None:
    """It says so, and watches it once it is there: from its folders on, not from the first of its jobs."""
    empty = tmp_path_factory.mktemp("empty")
    which = ["--results", "results/demo"] if named else []
    process = subprocess.Popen(
        [sys.executable, "-m", "draftsmith", "status", "--watch", "--json", "--every", "0.2", *which], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, cwd=empty, env=_ENVIRONMENT,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    reason, said = process.stderr.readline(), process.stderr.readline()
    assert ("results/demo: no such run" if named else "no run has left results or logs here") in reason
    assert said == "waiting until it is there; Ctrl-C leaves\n"
    (empty / "logs/demo").mkdir(parents=True)
    first = json.loads(process.stdout.readline())
    assert {job["state"] for job in first["jobs"]} == {"waiting"}
    shutil.copytree(root / "logs/demo", empty / "logs/demo", dirs_exist_ok=True)
    told, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    states = {job["stage"]: job["state"] for job in json.loads(told.splitlines()[-1])["jobs"]}
    assert states["train_draft"] == "failed"


def test_ctrl_c_ends_the_waiting(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "draftsmith", "status", "--watch"], stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=_ENVIRONMENT
    )  # fmt: skip
    assert process.stderr is not None
    lines = [process.stderr.readline(), process.stderr.readline()]
    process.send_signal(signal.SIGINT)
    assert (process.communicate(timeout=60)[1], process.returncode) == ("", 0)
    assert "Ctrl-C leaves" in lines[1]


def test_watch_as_json_is_an_object_a_line(root: Path) -> None:
    done = command(root, "--watch", "--json")
    assert [json.loads(line)["name"] for line in done.stdout.splitlines()] == ["demo"]


def test_a_live_table_on_a_terminal_and_a_clean_end_by_ctrl_c(root: Path) -> None:
    progress(root)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "draftsmith", "status", "--watch", "--every", "0.2"], stdin=theirs, stdout=theirs, stderr=subprocess.PIPE,
        cwd=root, env=_ENVIRONMENT | {"TERM": "xterm", "COLUMNS": "160"},
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    deadline = time.time() + 60
    # The second look as well, so that it is in its loop.
    while shown.count(b"running") < 2 and time.time() < deadline:
        if select.select([ours], [], [], 1)[0]:
            shown += os.read(ours, 65536)
    process.send_signal(signal.SIGINT)
    while process.poll() is None:
        if select.select([ours], [], [], 0.2)[0]:
            try:
                shown += os.read(ours, 65536)
            except OSError:
                break
    assert process.wait(timeout=60) == 0
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert b"train_draft" in shown
    os.close(ours)


def test_no_such_run_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DraftsmithError, match="no run has left results or logs here; give --results"):
        status.run(None, watch=False, as_json=False, every=1.0)
    (tmp_path / "results").mkdir()
    with pytest.raises(DraftsmithError, match="results: no such run"):
        status.run(Path("results"), watch=False, as_json=False, every=1.0)
    with pytest.raises(DraftsmithError, match="results/none: no such run"):
        status.run(Path("results/none"), watch=False, as_json=False, every=1.0)
