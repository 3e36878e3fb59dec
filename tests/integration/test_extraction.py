"""extract_shard against Hugging Face, with vLLM's real engine on the CPU."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny
from draftsmith import store
from extraction import extract, rows_of, settings, worst_error, write_rows


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("models") / "llama")


def test_only_missing_rows_are_computed(tmp_path: Path, llama: Path) -> None:
    rows = rows_of([50] * 12)
    first = extract(tmp_path, llama, rows)
    files = {path: path.stat().st_mtime_ns for path in Path(first["store"]).glob("*.safetensors")}
    inserted = rows_of([33], seed=7)
    second = extract(tmp_path, llama, inserted + rows[:6] + rows[7:])
    assert second["figures"]["reused_rows"] == 11
    assert second["figures"]["tokens"] == 33
    assert {path: path.stat().st_mtime_ns for path in files} == files
    assert set(second["rows"]) == {store.row_id(row) for row in inserted + rows[:6] + rows[7:]}


def test_shards_cover_every_row_once_and_share_the_store(tmp_path: Path, llama: Path) -> None:
    rows = rows_of([60] * 20, seed=3)
    config = settings(tmp_path, extract={"batch_tokens": 128})
    parts = [extract(tmp_path, llama, rows, config=config, shard=f"{place}-of-2") for place in (1, 2)]
    assert not set(parts[0]["rows"]) & set(parts[1]["rows"])
    assert set(parts[0]["rows"]) | set(parts[1]["rows"]) == {store.row_id(row) for row in rows}
    again = extract(tmp_path, llama, rows, config=config)
    assert again["figures"]["reused_rows"] == 20, "another number of shards computes nothing again"


def test_damaged_files_are_computed_again(tmp_path: Path, llama: Path) -> None:
    rows = rows_of([100] * 6, seed=4)
    first = extract(tmp_path, llama, rows)
    files = sorted(Path(first["store"]).glob("*.safetensors"))
    with open(files[0], "r+b") as file:
        file.truncate(files[0].stat().st_size // 2)
    files[1].write_bytes(b"")
    second = extract(tmp_path, llama, rows)
    assert second["figures"]["batches"] == 2
    assert worst_error(AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32), second, rows) <= 1e-5


def _started(tmp_path: Path, llama: Path, rows: list[list[int]]) -> tuple[subprocess.Popen[bytes], Path]:
    """The stage as a process of its own, with so small steps that it takes a while; returns once two batches are published."""
    (tmp_path / "target.json").write_text(json.dumps(tiny.target(llama)))
    write_rows(tmp_path / "rows.parquet", rows)
    config = settings(tmp_path, engine={"max_num_batched_tokens": 32, "max_num_seqs": 2})
    with open(tmp_path / "log", "ab") as log:
        process = subprocess.Popen(_command(tmp_path, config.model_dump_json()), stderr=log, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(list((tmp_path / "store").glob("*/*.safetensors"))) < 2:
        assert process.poll() is None, (tmp_path / "log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process, next((tmp_path / "store").iterdir())


def _command(tmp_path: Path, config: str) -> list[str]:
    return [
        sys.executable, "-m", "draftsmith", "extract-shard", "--settings", config,
        "--target", str(tmp_path / "target.json"), "--rows", str(tmp_path / "rows.parquet"), "--scatteritem", "1-of-1",
        "--manifest", str(tmp_path / "manifest.json"),
    ]  # fmt: skip


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path, llama: Path, how: signal.Signals) -> None:
    """kill -9 loses what was not published; SIGTERM finishes the open batches first. Neither computes a published one again."""
    rows = rows_of([120] * 80, seed=11)
    process, folder = _started(tmp_path, llama, rows)
    process.send_signal(how)
    code = process.wait(60)
    assert code == (-9 if how == signal.SIGKILL else 143)
    done = {path: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}
    assert 2 <= len(done) < 40
    config = settings(tmp_path, engine={"max_num_batched_tokens": 512})
    with open(tmp_path / "log", "ab") as log:
        subprocess.run(_command(tmp_path, config.model_dump_json()), check=True, stderr=log)
    assert {path: path.stat().st_mtime_ns for path in done} == done
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert list(manifest["rows"]) == [store.row_id(row) for row in rows]
    assert len({tuple(place) for place in manifest["rows"].values()}) == 80
    assert manifest["figures"]["reused_rows"] == sum(len(store.read_header(path)[0].rows) for path in done)
    assert worst_error(AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32), manifest, rows[::9]) <= 1e-5
    assert not list((folder / ".staging").iterdir()), "what the killed run left is swept away"
