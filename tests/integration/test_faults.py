"""Whatever breaks in extraction is told by type, message, whole traceback, rank, stage and rows, and costs nothing that is finished."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import tiny
from draftsmith import store
from draftsmith.errors import DraftsmithError
from draftsmith.extract_shard import publish, space, worker, writer
from draftsmith.extract_shard.capture import Capture
from draftsmith.extract_shard.driver import ExtractionFailed
from extraction import extract, rows_of, settings, worst_error, write_rows

FAULTS = Path(__file__).parent / "faults"


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("models") / "llama")


def ledger(folder: Path) -> list[dict[str, Any]]:
    """Every error in the store's ledger, in order."""
    files = sorted((folder / "store").glob("*/.ledger/*.json"))
    return [entry for file in files for entry in json.loads(file.read_text())["errors"]]


class Empty(Exception):
    """An exception whose text is empty."""


@pytest.mark.parametrize("error", [AssertionError(), NotImplementedError(), Empty("")])
def test_an_error_without_text_is_told_in_full(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """It breaks every step, so the engine is not started again: nothing was brought."""

    def take(self: Capture, tokens: int) -> None:
        raise error

    monkeypatch.setattr(Capture, "take", take)
    rows = rows_of([30] * 2, seed=8)
    with pytest.raises(ExtractionFailed) as raised:
        extract(tmp_path, llama, rows)
    ids = [store.row_id(row) for row in rows]
    text = str(raised.value)
    assert text.startswith(f"extraction broke off: {type(error).__name__} (stage step rank 0); 0 batches")
    # The cause comes last: that is what a terminal shows.
    assert f"--- {type(error).__name__} (stage step, rank 0, rows {ids[0]}, {ids[1]}) ---" in text
    assert text.rstrip().splitlines()[-1].split(".")[-1].startswith(type(error).__name__)
    assert "raise error" in text
    entry = ledger(tmp_path)[0]
    assert (entry["type"], entry["rank"], entry["stage"], entry["rows"]) == (type(error).__name__, 0, "step", ids)
    assert "raise error" in entry["traceback"]


def breaks_with(monkeypatch: pytest.MonkeyPatch, row: list[int]) -> list[int]:
    """The engine breaks in every step with this row; gives a list with the number of rows in each such step."""
    hit: list[int] = []
    collect = worker.Recorder.collect

    def broken(self: worker.Recorder, output: Any) -> None:
        if store.row_id(row) in self.rows_in_step:
            hit.append(len(self.rows_in_step))
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        collect(self, output)

    monkeypatch.setattr(worker.Recorder, "collect", broken)
    return hit


def test_a_row_that_breaks_the_engine_is_left_out_and_the_rest_goes_on(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third of twelve rows crashes each step with it: once among others, once alone; then it is left out."""
    rows = rows_of([60] * 12, seed=21)
    guilty = store.row_id(rows[6])
    hit = breaks_with(monkeypatch, rows[6])
    config = settings(tmp_path, extract={"max_failed_fraction": 0.1, "batch_tokens": 120}, engine={"max_num_seqs": 2})
    manifest = extract(tmp_path, llama, rows, config=config)
    assert hit[-1] == 1
    assert len(hit) == 2
    assert [entry["row_id"] for entry in manifest["failed"]] == [guilty]
    assert "illegal memory access" in manifest["failed"][0]["error"]
    assert "Traceback" in manifest["failed"][0]["traceback"]
    assert set(manifest["rows"]) == {store.row_id(row) for row in rows} - {guilty}
    assert manifest["figures"]["starts"] == 2
    assert worst_error(AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32), manifest, rows[:6]) <= 1e-5


def test_too_many_rows_left_out_fail_the_run(tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of([60] * 4, seed=22)
    breaks_with(monkeypatch, rows[3])
    config = settings(tmp_path, extract={"batch_tokens": 60}, engine={"max_num_seqs": 1})
    with pytest.raises(DraftsmithError, match=r"1 of 4 rows could not be extracted, more than extract\.max_failed"):
        extract(tmp_path, llama, rows, config=config)
    assert len(list((tmp_path / "store").glob("*/*.safetensors"))) == 3


def test_a_suspect_of_an_earlier_run_comes_last_and_alone(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The very first row breaks the engine before anything is there; the next run leaves it for the end."""
    rows = rows_of([60] * 6, seed=23)
    config = settings(tmp_path, extract={"max_failed_fraction": 0.2, "batch_tokens": 60}, engine={"max_num_seqs": 1})
    with monkeypatch.context() as patch:
        breaks_with(patch, rows[0])
        with pytest.raises(ExtractionFailed):
            extract(tmp_path, llama, rows, config=config)
        manifest = extract(tmp_path, llama, rows, config=config)
    assert [entry["row_id"] for entry in manifest["failed"]] == [store.row_id(rows[0])]
    # Mended, it is tried again: nothing is left out for good.
    assert extract(tmp_path, llama, rows, config=config)["failed"] == []


def test_a_shard_that_is_gone_is_told_before_the_load(tmp_path: Path, llama: Path) -> None:
    """One of the checkpoint's files goes away after it was described."""
    broken = tmp_path / "model"
    shutil.copytree(llama, broken)
    AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).save_pretrained(broken, max_shard_size="300KB")
    (broken / "model.safetensors").unlink()
    described = tiny.target(broken)
    gone = sorted(broken.glob("model-*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(
        DraftsmithError, match=rf"weight files that .* are missing, the first is {gone.name}; complete the"
    ):
        extract(tmp_path, broken, rows_of([30]), described=described)


def test_a_weight_of_a_wrong_shape_is_told_with_the_stage(tmp_path: Path, llama: Path) -> None:
    broken = tmp_path / "model"
    shutil.copytree(llama, broken)
    weights = load_file(broken / "model.safetensors")
    name = "model.layers.2.mlp.down_proj.weight"
    weights[name] = weights[name][:, :-8].contiguous()
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ExtractionFailed, match=r"broke off: \w+ \(stage load rank 0\)"):
        extract(tmp_path, broken, rows_of([30]))
    assert ledger(tmp_path)[0]["stage"] == "load"
    assert "Traceback" in ledger(tmp_path)[0]["traceback"]


def test_a_failed_write_is_told_and_loses_nothing_else(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of([100] * 8, seed=24)
    calls = []
    fsync = os.fsync

    def failing(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        # Batch files alone: JSON is written by way of hidden names.
        if path.endswith(".tmp") and not Path(path).name.startswith("."):
            calls.append(descriptor)
            if len(calls) >= 3:
                raise OSError(5, "Input/output error")
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(writer.os, "fsync", failing)
        with pytest.raises(ExtractionFailed) as raised:
            extract(
                tmp_path, llama, rows, config=settings(tmp_path, extract={"batch_tokens": 100, "max_engine_starts": 1})
            )
    assert str(raised.value).startswith("extraction broke off: OSError (stage write rank 0); 2 batches")
    assert "Input/output error" in str(raised.value)
    assert ledger(tmp_path)[0]["rows"]
    manifest = extract(tmp_path, llama, rows, config=settings(tmp_path, extract={"batch_tokens": 100}))
    assert manifest["figures"]["reused_rows"] == 2
    assert manifest["failed"] == []


@pytest.mark.parametrize(("value", "what"), [(float("nan"), "NaN or infinite"), (0.0, "all-zero")])
def test_a_row_with_a_broken_state_is_tried_twice_and_left_out(tmp_path: Path, value: float, what: str) -> None:
    """The embedding of one token is NaN or zero and layer 0 is captured, so the rows that hold it, and no others, fail."""
    folder = tiny.model(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight[300] = value
    model.save_pretrained(folder)
    rows = rows_of([40] * 8, seed=5)
    rows[2][10] = 300
    config = settings(tmp_path, extract={"max_failed_fraction": 0.2}, target={"layers": [0, 2, 4]})
    manifest = extract(tmp_path, folder, rows, config=config)
    bad = store.row_id(rows[2])
    assert [entry["row_id"] for entry in manifest["failed"]] == [bad]
    # How many of the row's tokens are hit depends on the attention kernel: a masked NaN is still a NaN in some.
    assert f"{what} hidden state at" in manifest["failed"][0]["error"]
    assert "Traceback" in manifest["failed"][0]["traceback"]
    assert set(manifest["rows"]) == {store.row_id(row) for row in rows} - {bad}
    assert manifest["figures"]["starts"] == 1


def test_a_state_that_does_not_give_the_engines_token_is_not_published(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head of another model stands for every fault of this kind: wrong norm, wrong layer, wrong row."""
    monkeypatch.setattr(
        publish, "head_weight", lambda folder: torch.randn(320, 64, generator=torch.Generator().manual_seed(9))
    )
    with pytest.raises(DraftsmithError, match="lm_head of the stored final state gives token"):
        extract(tmp_path, llama, rows_of([30] * 4, seed=6))
    assert not list((tmp_path / "store").glob("*/*.safetensors"))


def test_a_check_that_fails_once_costs_no_row(tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a batch that was refused are tried again, each alone and each compared."""
    compare, calls = publish.HeadCheck._compare, []

    def once(self: publish.HeadCheck, logits: torch.Tensor, token: int, names: torch.Tensor) -> str | None:
        calls.append(token)
        return "refused" if len(calls) == 1 else compare(self, logits, token, names)

    monkeypatch.setattr(publish.HeadCheck, "_compare", once)
    rows = rows_of([30] * 4, seed=6)
    manifest = extract(tmp_path, llama, rows)
    assert manifest["failed"] == []
    assert len(manifest["rows"]) == 4
    assert len(calls) == 5


def test_a_disk_that_fills_up_stops_the_run_while_there_is_room(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of([100] * 30, seed=25)
    config = settings(tmp_path, extract={"batch_tokens": 100}, engine={"max_num_seqs": 2, "max_num_batched_tokens": 32})
    usage = shutil.disk_usage
    monkeypatch.setattr(space, "_LOOK_SECONDS", 0.0)

    def filling(path: Path) -> Any:
        published = len(list((tmp_path / "store").glob("*/*.safetensors")))
        real = usage(path)
        return real._replace(free=10_000_000) if published >= 3 else real

    with monkeypatch.context() as patch:
        patch.setattr(space.shutil, "disk_usage", filling)
        with pytest.raises(
            DraftsmithError,
            match=r"only 0\.01 GB are free, and what is begun may need 0\.\d+ GB; \d+ batches were added, run the same command",
        ):
            extract(tmp_path, llama, rows, config=config)
    done = len(list((tmp_path / "store").glob("*/*.safetensors")))
    assert 3 <= done < 30
    assert extract(tmp_path, llama, rows, config=config)["figures"]["reused_rows"] == done


def started(
    folder: Path, model: Path, fault: dict[str, Any] | None, tp: int, rows: list[list[int]], keep: tuple[str, ...] = ()
) -> subprocess.Popen[bytes]:
    """The stage by its command, with its output in `log` and its lines for the terminal in `terminal`."""
    (folder / "target.json").write_text(json.dumps(tiny.target(model)))
    write_rows(folder / "rows.parquet", rows)
    config = settings(folder, engine={"tp": tp, "device": "cpu", "max_num_batched_tokens": 32, "max_num_seqs": 2})
    # Without what engines in this process have set for themselves.
    clean = {
        name: value
        for name, value in os.environ.items()
        if name in keep or not name.startswith(("VLLM_", "DRAFTSMITH_"))
    }
    environment = clean | {"PYTHONPATH": os.pathsep.join([str(FAULTS), os.environ.get("PYTHONPATH", "")])}
    environment |= {"DRAFTSMITH_FAULT": json.dumps(fault), "DRAFTSMITH_CONSOLE": "3"}
    command = [
        sys.executable, "-m", "draftsmith", "extract-shard", "--settings", config.model_dump_json(), "--config", config.model_dump_json(),
        "--target", str(folder / "target.json"), "--rows", str(folder / "rows.parquet"), "--scatteritem", "1-of-1",
        "--manifest", str(folder / "manifest.json"),
    ]  # fmt: skip
    # As the rule does it.
    shell = ["bash", "-c", f'exec "$@" 3>{folder}/terminal >{folder}/log 2>&1', "bash", *command]
    return subprocess.Popen(shell, env=environment, start_new_session=True)


def test_an_assert_on_the_second_rank_ends_the_run_in_seconds(tmp_path: Path, llama: Path) -> None:
    """The first rank waits for it in a collective; vLLM by itself would give up after five minutes, without the cause."""
    process = started(tmp_path, llama, {"kind": "assert", "rank": 1, "step": 3}, 2, rows_of([600] * 4, seed=31))
    assert process.wait(300) == 1
    terminal = (tmp_path / "terminal").read_text()
    entry = ledger(tmp_path)[0]
    assert (entry["type"], entry["message"], entry["rank"], entry["stage"]) == ("AssertionError", "", 1, "step")
    assert entry["rows"]
    tail = terminal.rstrip().splitlines()[-12:]
    assert any(line.startswith("--- AssertionError (stage step, rank 1, rows ") for line in terminal.splitlines())
    assert "assert self.steps_seen < 0" in "\n".join(tail)
    assert "assert self.steps_seen < 0" in (tmp_path / "log").read_text()
    written = max(file.stat().st_mtime for file in (tmp_path / "store").glob("*/.ledger/*.json"))
    assert written - entry["time"] < 30


def test_a_worker_killed_from_outside_is_named(tmp_path: Path, llama: Path) -> None:
    process = started(tmp_path, llama, {"kind": "kill", "rank": 1, "step": 3}, 2, rows_of([600] * 4, seed=32))
    assert process.wait(300) == 1
    terminal = (tmp_path / "terminal").read_text()
    assert "extraction broke off: WorkerKilled (stage step rank 1)" in terminal
    assert "ended without an exception: it was killed from outside" in terminal
    assert [entry["rank"] for entry in ledger(tmp_path) if entry["type"] == "WorkerKilled"] == [1]


def at_work(
    folder: Path, model: Path, fault: dict[str, Any] | None, tp: int, **environment: str
) -> tuple[subprocess.Popen[bytes], list[psutil.Process]]:
    """The stage once its first file is there, and the engine's processes."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        process = started(folder, model, fault, tp, rows_of([600] * 200, seed=33), keep=tuple(environment))
    deadline = time.monotonic() + 600
    while not list((folder / "store").glob("*/*.safetensors")):
        assert process.poll() is None, (folder / "log").read_text()
        if time.monotonic() > deadline:
            process.terminate()
            raise AssertionError((folder / "log").read_text())
        time.sleep(0.1)
    children = psutil.Process(process.pid).children(recursive=True)
    return process, [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]


def killed_driver(
    folder: Path, model: Path, fault: dict[str, Any] | None, tp: int, **environment: str
) -> list[psutil.Process]:
    """Kill the stage by SIGKILL while its engine is at work; gives the engine's processes."""
    process, engine = at_work(folder, model, fault, tp, **environment)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return engine


def living(processes: list[psutil.Process]) -> list[int]:
    return [child.pid for child in processes if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


def test_sigterm_to_every_process_of_a_job_ends_it_with_its_open_batches(tmp_path: Path, llama: Path) -> None:
    """As scancel and a time limit have it, here to the engine first: nothing is computed in vain, blamed or loaded again."""
    process, engine = at_work(tmp_path, llama, None, 1, VLLM_ENABLE_V1_MULTIPROCESSING="1")
    try:
        assert len(engine) >= 2
        for each in [*engine, process]:
            each.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
        assert living(engine) == []
    finally:
        for child in [*engine, process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    log = (tmp_path / "log").read_text()
    assert re.search(r"SIGTERM: no new batch is begun, [1-9]\d* rows of open batches are finished", log)
    assert "extract: ended by SIGTERM" in log
    assert log.count("engine ready after") == 1
    assert ledger(tmp_path) == []


def test_the_engine_of_a_killed_driver_is_found_and_named_by_the_next_run(tmp_path: Path, llama: Path) -> None:
    """Should it not end by itself, as the next test has it."""
    engine = killed_driver(tmp_path, llama, {"kind": "outlive"}, 2)
    try:
        (core,) = [
            child for child in engine if child.is_running() and child.ppid() not in {other.pid for other in engine}
        ]
        clean = [sys.executable, "-m", "draftsmith", "clean-gpus", "--report", str(tmp_path / "clean.json"), "--config"]
        named = subprocess.run([*clean, '{"engine": {"device": "cpu"}}'], check=True, capture_output=True, text=True)
        assert f"an earlier run left process {core.pid} of" in named.stderr
        assert living([core])
        ending = '{"engine": {"device": "cpu"}, "clean": {"kill_orphans": true}}'
        subprocess.run([*clean, ending], check=True, capture_output=True)
        psutil.wait_procs(engine, timeout=30)
        assert living(engine) == []
    finally:
        for child in engine:
            if child.is_running():
                child.kill()


def test_an_engine_whose_driver_was_killed_ends_by_itself_and_its_leftovers_go(tmp_path: Path, llama: Path) -> None:
    """vLLM's core alone would live on. Its sockets stay, and go with the next run's cleaning."""
    # A socket's path has to be short.
    runtime, temporary = tmp_path / "runtime", Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
    places = {"DRAFTSMITH_RUNTIME": str(runtime), "TMPDIR": str(temporary)}
    engine = killed_driver(tmp_path, llama, None, 1, VLLM_ENABLE_V1_MULTIPROCESSING="1", **places)
    try:
        assert len(engine) >= 2
        psutil.wait_procs(engine, timeout=30)
        assert living(engine) == []
    finally:
        for child in engine:
            if child.is_running():
                child.kill()
    (listed,) = (runtime / "runs").glob("*.json")
    shared = [Path(name) for name, _ in json.loads(listed.read_text())["files"]]
    assert shared
    assert list(temporary.glob("ds-*"))
    clean = [sys.executable, "-m", "draftsmith", "clean-gpus", "--report", str(tmp_path / "clean.json")]
    subprocess.run([*clean, "--config", '{"engine": {"device": "cpu"}}'], check=True, env=os.environ | places)
    assert not [path for path in shared if path.exists()]
    assert not list(temporary.glob("ds-*"))
    assert not listed.exists()
    shutil.rmtree(temporary)
