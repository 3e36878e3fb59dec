"""The benchmarks run and end in a line of JSON; what they measure is theirs to say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_extraction_beside_prefill(repo: Path, tmp_path: Path) -> None:
    """A model of 64 numbers a token, so that a pass takes a blink; every row of it is published, or the benchmark fails."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    done = subprocess.run(
        [
            sys.executable, str(repo / "benchmarks/extraction.py"), "--device", "cpu", "--shape", "tiny", "--tokens", "2048", "--repeats", "1",
            "--ways", "plain,ours", "--store", str(tmp_path / "store"), "--disk", str(tmp_path / "disk"), "--logs", str(tmp_path / "logs"),
        ],
        cwd=tmp_path, env=clean | {"PYTHONPATH": str(repo / "workflow")}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[0]["bytes_per_token"] == 4 * 64 * 4
    assert lines[0]["disk_raw_gb_per_second"] > 0
    last = lines[-1]
    assert last["ratio_to_prefill"] == lines[1]["ratio_to_prefill"] > 0
    assert last["ratio_disk_to_prefill"] > 0
    assert last["ours_peak_host_gb"] > 0
    assert set(last["ours_start"]["startup"]) == {"import", "load", "attach"}
    assert not (tmp_path / "store").exists()


def test_training_from_the_store(repo: Path, tmp_path: Path) -> None:
    """The stage alone, on a target of 64 numbers a token; speculators is only measured where its folder is given."""
    done = subprocess.run(
        [
            sys.executable, str(repo / "benchmarks/training.py"), "--quick", "--packs", "2", "--steps", "2", "--windows", "1",
            "--store", str(tmp_path / "store"), "--logs", str(tmp_path / "logs"),
        ],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(repo / "workflow")}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    way, last = (json.loads(line) for line in done.stdout.splitlines())
    assert way["way"] == "ours"
    assert way["tokens_per_second"] > 0
    assert 0 <= way["waited_for_data"] < 1
    # Step 1, and the last of each window of two.
    assert len(way["loss"]) == 3
    # Three layers and the final state of 1,024 tokens, 64 float32 each.
    assert last["stored_gb"] * 1e9 >= 1024 * 4 * 64 * 4
    assert not (tmp_path / "store").exists()
