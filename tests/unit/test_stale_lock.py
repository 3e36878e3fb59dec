"""A lock that a killed run left goes; a run that is alive stays undisturbed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftsmith import stale_lock
from draftsmith.errors import DraftsmithError


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("/env/bin/python /env/bin/snakemake --profile local", True),
        ("python -m snakemake --cores 1", True),
        ("python3.11 -m draftsmith extract-shard --settings {}", True),
        ("/env/bin/python /env/bin/draftsmith tokenize", True),
        ("VLLM::EngineCore", True),
        ("vim Snakefile", False),
        ("grep -r snakemake .", False),
        ("python -m pytest tests", False),
        ("python -m draftsmith.headline results/demo", False),
        ("", False),
    ],
)
def test_which_processes_are_a_run(command: str, expected: bool) -> None:
    assert stale_lock.is_ours(command.split()) is expected


def test_a_folder_without_a_lock(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stale_lock.run(tmp_path)
    assert capfd.readouterr().err == ""


def test_a_stale_lock_is_removed(clone: Path, capfd: pytest.CaptureFixture[str]) -> None:
    locks = clone / stale_lock.LOCKS
    locks.mkdir(parents=True, exist_ok=True)
    (locks / "0.output.lock").write_text("results/demo/target.json\n")
    stale_lock.run(clone)
    assert list(locks.glob("*")) == []
    assert "its lock is removed" in capfd.readouterr().err


def test_a_run_that_is_alive_keeps_its_lock(tmp_path: Path) -> None:
    """A stage that outlived its killed Snakemake counts as well: it writes the same files."""
    (tmp_path / stale_lock.LOCKS).mkdir(parents=True)
    (tmp_path / stale_lock.LOCKS / "0.output.lock").touch()
    (tmp_path / "draftsmith.py").write_text("import time\ntime.sleep(60)\n")
    stage = subprocess.Popen([sys.executable, "-m", "draftsmith"], cwd=tmp_path, env={})
    try:
        end = time.monotonic() + 20
        while not stale_lock.at_work(tmp_path) and time.monotonic() < end:
            time.sleep(0.05)
        with pytest.raises(DraftsmithError, match=rf"process {stage.pid} .* is at work here; wait for it, or end it"):
            stale_lock.run(tmp_path)
    finally:
        stage.kill()
        stage.wait()
    assert (tmp_path / stale_lock.LOCKS / "0.output.lock").exists()
    assert stale_lock.at_work(tmp_path) == {}
