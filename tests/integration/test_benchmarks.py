"""The benchmarks run and end in a line of JSON; what they measure is theirs to say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import tiny


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
    assert list((tmp_path / "store").iterdir()) == list((tmp_path / "disk").iterdir()) == []


def test_training_from_the_store(repo: Path, tmp_path: Path) -> None:
    """The stage alone, on a target of 64 numbers a token; speculators is only measured where its folder is given.

    What was in the folder before stays there.
    """
    (tmp_path / "store").mkdir()
    (tmp_path / "store/states.safetensors").write_text("of another run")
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
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["states.safetensors"]


def test_tokenize_beside_a_plain_map(repo: Path, tmp_path: Path) -> None:
    """Both ways on the same conversations, and the second run, which makes the one that was added."""
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    target = {"path": str(tmp_path / "model"), "trust_remote_code": False, "vocab_size": 320, "fingerprint": "tiny"}
    (tmp_path / "target.json").write_text(json.dumps(target))
    done = subprocess.run(
        [sys.executable, str(repo / "benchmarks/tokenize.py"), "--quick", "--conversations", "200", "--target", "target.json"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(repo / "workflow")}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, last = (json.loads(line) for line in done.stdout.splitlines())
    assert last["ratio"] == first["ratio"] > 0
    assert last["conversations"] == 200
    assert (last["second_run_made"], last["second_run_reused"]) == (1, 200)
    assert 0 < last["peak_gb_above_imports"] < 2
    assert (last["processes"], last["second_run_processes"]) == (1, 1)
    assert "200 conversations were made" in (tmp_path / "logs/benchmarks/tokenize-stage.log").read_text()


def test_a_benchmark_named_as_a_module_of_the_library_hides_it_from_nobody(repo: Path) -> None:
    """Python looks for modules in a script's folder first, and `inspect` needs the library's tokenize."""
    code = "import sys; sys.path.insert(0, 'benchmarks'); import inspect, tokenize; print(tokenize.__file__, tokenize.open)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.modules.pop('tokenize', None); {code}"],
        cwd=repo, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "benchmarks" not in done.stdout
