"""The dry run's own part: when it is wanted, what it hands to the extraction, and what it makes of a failure."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from draftsmith import clean_gpus, dry_run, hardware, store
from draftsmith.config import Config, parse
from draftsmith.errors import DraftsmithError
from draftsmith.processes.run_mark import here
from draftsmith.signals import EXIT_TERMINATED

H200 = hardware.Gpu("0", "H200", 141 << 30, 0)
TARGET: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_layers": 20, "hidden_size": 64, "fingerprint": "f" * 64,
    "torch_dtype": "float32",
}  # fmt: skip


def config(tmp_path: Path, **sections: Any) -> Config:
    values = {
        "engine": {"device": "cpu"},
        "extract": {"store": str(tmp_path / "store")},
        "preflight": {"dry_run": True},
    }
    return parse(values | {"target": {"layers": [2, 10, 17]}} | sections, "test")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Six rows of 3 to 8 tokens."""
    every = [list(range(1, length + 1)) for length in (5, 3, 8, 4, 7, 6)]
    table = {
        "row_id": [store.row_id(row) for row in every],
        "input_ids": [np.array(row, dtype=np.int32) for row in every],
        "length": [len(row) for row in every],
        "span_ends": [[2]] * 6,
    }
    pd.DataFrame(table).to_parquet(tmp_path / "rows.parquet")
    return tmp_path / "rows.parquet"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint's folder, as far as the dry run looks into it."""
    folder = tmp_path / "model"
    folder.mkdir()
    settings = {"num_hidden_layers": 20, "layer_types": ["full", "linear"] * 10, "quantization_config": {"bits": 4}}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "additional_chat_templates").mkdir()
    return folder


@pytest.mark.parametrize(
    ("asked", "gpus", "reason"),
    [
        (True, 0, None),
        (True, 1, None),
        (None, 1, None),
        (None, 0, "no GPU is used here, and preflight.dry_run is unset"),
        (False, 1, "preflight.dry_run is false"),
    ],
)
def test_when_it_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: bool | None, gpus: int, reason: str | None
) -> None:
    monkeypatch.setattr(hardware, "gpus", lambda: (H200,) * gpus)
    found = dry_run.wanted(config(tmp_path, preflight={"dry_run": asked}))
    assert found == reason if reason is None else str(found).startswith(reason)


def test_where_it_is_not_wanted_it_says_so_and_looks_at_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clean_gpus, "check", lambda config: pytest.fail("GPUs are nobody's business then"))
    begun = time.perf_counter()
    dry_run.run(
        config(tmp_path, preflight={"dry_run": False}), target=tmp_path / "none", rows=tmp_path / "none", gpus=0, report=tmp_path / "dry_run.json"
    )  # fmt: skip
    assert time.perf_counter() - begun < 1
    made = json.loads((tmp_path / "dry_run.json").read_text())
    assert (made["verdict"], made["reason"]) == ("skipped", "preflight.dry_run is false")
    assert made["checks"] == [{"name": "dry run", "status": "skip", "detail": "preflight.dry_run is false"}]


def test_the_target_is_the_same_with_few_layers(tmp_path: Path, model: Path, rows: Path) -> None:
    (tmp_path / "trial").mkdir()
    given = config(
        tmp_path,
        engine={
            "device": "cpu", "tp": 8,
            "args": {
                "quantization": "x", "model_loader_extra_config": {"a": 1}, "load_format": "runai_streamer",
                "hf_overrides": {"layer_types": ["full"] * 20},
            },
        },
    )  # fmt: skip
    trial = dry_run.prepare(given, TARGET | {"path": str(model)}, [2, 10, 17], rows, tmp_path / "trial")
    target = json.loads((trial.folder / "target.json").read_text())
    small = Path(target["path"])
    assert json.loads((small / "config.json").read_text()) == {
        "num_hidden_layers": 4, "layer_types": ["full", "linear", "full", "linear"], "quantization_config": {"bits": 4},
    }  # fmt: skip
    assert {path.name for path in small.iterdir()} == {path.name for path in model.iterdir()}
    assert (small / "model.safetensors").resolve() == model / "model.safetensors"
    assert target == TARGET | {
        "path": str(small),
        "num_layers": 4,
        "fingerprint": "dry-run",
        "states_fingerprint": "dry-run",
    }
    assert trial.config.engine == given.engine.model_copy(
        update={"args": {"quantization": "x", "load_format": "dummy", "hf_overrides": {"layer_types": ["full"] * 4}}}
    )
    assert trial.config.extract == given.extract.model_copy(
        update={"store": str(trial.folder / "store"), "max_engine_starts": 1}
    )
    assert (trial.count, trial.layers, trial.config.target.layers) == (4, [1, 2, 3], [1, 2, 3])
    kept = pd.read_parquet(trial.folder / "rows.parquet")
    assert list(kept["length"]) == [8, 7, 6, 5], "the four longest"
    assert "span_ends" in kept


@pytest.mark.parametrize(
    ("layers", "expected", "count"),
    [
        ([0, 10, 17], [0, 2, 3], 4),
        ([0], [0], 4),
        ([5], [3], 4),
        ([2, 4, 6, 8, 10], [1, 2, 3, 4, 5], 6),
        ([0, 4, 6, 8, 10], [0, 2, 3, 4, 5], 6),
    ],
)
def test_as_many_layers_are_captured_and_layer_zero_only_where_the_run_does(
    tmp_path: Path, model: Path, rows: Path, layers: list[int], expected: list[int], count: int
) -> None:
    (tmp_path / "trial").mkdir()
    trial = dry_run.prepare(config(tmp_path), TARGET | {"path": str(model)}, layers, rows, tmp_path / "trial")
    assert (trial.layers, trial.count) == (expected, count)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a shell script in the place of the extraction."""

    def put(text: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        monkeypatch.setattr(dry_run.sys, "executable", str(path))

    return put


def run(tmp_path: Path, model: Path, rows: Path) -> dict[str, Any]:
    (tmp_path / "target.json").write_text(json.dumps(TARGET | {"path": str(model)}))
    report = tmp_path / "dry_run.json"
    dry_run.run(config(tmp_path), target=tmp_path / "target.json", rows=rows, gpus=0, report=report)
    return dict(json.loads(report.read_text()))


FAILING = """
echo 'INFO vLLM says a lot'
echo 'Traceback (most recent call last):'
echo '  File "worker.py", line 3, in load_model' >&2
echo 'torch.OutOfMemoryError: CUDA out of memory' >&2
exit 3
"""


def test_a_failure_shows_its_traceback_and_the_mend(
    tmp_path: Path, model: Path, rows: Path, program: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    program(FAILING)
    with pytest.raises(DraftsmithError) as error:
        run(tmp_path, model, rows)
    said = str(error.value)
    assert said.startswith(
        "dry run: extraction: ended after 0 s with exit code 3, its traceback is above; memory ran out"
    )
    assert "lower engine.max_num_batched_tokens" in said
    assert "preflight.dry_run: false" in said
    shown = capfd.readouterr().err
    assert "INFO vLLM says a lot" in shown
    last = shown.split("dry run: what it ended with\n")[1]
    assert last.startswith('Traceback (most recent call last):\n  File "worker.py", line 3, in load_model\n')
    assert "dry run: FAIL  extraction" in last
    assert not (tmp_path / "dry_run.json").exists()
    kept = json.loads((tmp_path / "failed-dry_run.json").read_text())
    assert [check["status"] for check in kept["checks"]] == ["ok", "fail", "skip", "skip"]
    assert "OutOfMemoryError" in kept["checks"][1]["traceback"]
    assert not list((tmp_path / "store").iterdir()), "nothing of it stays in the store"


def test_sigterm_ends_the_extraction_as_well(tmp_path: Path, model: Path, rows: Path, program: Any) -> None:
    program(f"echo $$ > {tmp_path}/pid; sleep 60 & echo $! >> {tmp_path}/pid; wait")

    def end() -> None:
        while not (tmp_path / "pid").exists() or len((tmp_path / "pid").read_text().split()) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end).start()
    with pytest.raises(SystemExit) as left:
        run(tmp_path, model, rows)
    assert left.value.code == EXIT_TERMINATED
    for pid in map(int, (tmp_path / "pid").read_text().split()):
        assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]
    assert not list((tmp_path / "store").iterdir())


def test_an_extraction_that_hangs_is_ended(
    tmp_path: Path, model: Path, rows: Path, program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_run, "_SECONDS", 0.3)
    program("sleep 60")
    begun = time.perf_counter()
    with pytest.raises(DraftsmithError, match=r"extraction: ended after \d s with exit code -15"):
        run(tmp_path, model, rows)
    assert time.perf_counter() - begun < 20
    kept = json.loads((tmp_path / "failed-dry_run.json").read_text())
    assert kept["checks"][1]["traceback"].endswith("it was ended after 0 s")


def test_what_killed_runs_left_is_removed(tmp_path: Path, model: Path, rows: Path, program: Any) -> None:
    host = f"{os.uname().nodename}@{here()}"
    gone, alive, elsewhere = (
        tmp_path / "store" / f".dry-run-{name}" for name in (f"{host}-4194305", f"{host}-1", "another-4194305")
    )
    for folder in (gone, alive, elsewhere):
        folder.mkdir(parents=True)
    program(FAILING)
    with pytest.raises(DraftsmithError):
        run(tmp_path, model, rows)
    assert set((tmp_path / "store").iterdir()) == {alive, elsewhere}


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["noise", "Traceback (most recent call last):", "  File", "Error"], "Traceback (most recent call last):\n  File\nError"),
        (
            ["Traceback (most recent call last):", "of a worker", "12:00:00 error: what the stage says", "--- A ---"],
            "12:00:00 error: what the stage says\n--- A ---",
        ),
        (["killed"], "killed"),
        ([], ""),
    ],
)  # fmt: skip
def test_the_last_words_of_a_program(lines: list[str], words: str) -> None:
    assert dry_run.last_words(lines) == words


@pytest.mark.parametrize(
    ("text", "mend"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory", "lower engine.max_num_batched_tokens"),
        ("ValueError: 12 attention heads must be divisible by tensor parallel size", "another engine.tp"),
        ("ModuleNotFoundError: No module named 'tiktoken'", "install the environment"),
        ("ValueError: please pass trust_remote_code=True", "target.trust_remote_code"),
        ("ValueError: The quantization method x is not supported", "engine.args.quantization"),
        ("RuntimeError: NCCL error: unhandled system error", "NCCL_DEBUG"),
        ("it was ended after 1800 s", "it hung"),
        ("OSError: [Errno 28] No space left on device", "extract.store"),
        ("AssertionError", "the same would come after the load"),
        ("INFO quantization=None\nAssertionError", "the same would come after the load"),
    ],
)
def test_hints(text: str, mend: str) -> None:
    assert mend in dry_run.hint(text)
