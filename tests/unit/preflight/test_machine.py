"""GPUs, memory and disk against what the run needs."""

from __future__ import annotations

import errno
import json
import os
import struct
from itertools import accumulate
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from looked_at import Make, change_config

from batch_bytes import batch_bytes
from draftsmith import hardware, store
from draftsmith.errors import DraftsmithError
from draftsmith.preflight import machine as checks
from draftsmith.preflight.model import layers as check_layers
from draftsmith.target_weights import loaded_bytes
from draftsmith.verdict import Skip

GIB = 1 << 30
H200 = hardware.Gpu("0", "NVIDIA H200", 140 * GIB, 1 * GIB)
ON_GPUS = {"engine": {"device": "auto", "tp": 8}}


def test_no_gpu(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "cores", lambda: [0, 1, 5])
    assert checks.gpus(make()) == ("ok", "none; 3 CPU cores")


def test_gpus(make: Make, gpus: list[hardware.Gpu]) -> None:
    gpus += [H200] * 8
    assert checks.gpus(make(granted=8, settings=ON_GPUS)) == ("ok", "8 x NVIDIA H200, 140 GiB")
    with pytest.raises(DraftsmithError, match=r"engine\.tp is 8, but this job was granted 4 GPU"):
        checks.gpus(make(granted=4, settings=ON_GPUS))


def test_memory_that_somebody_holds(make: Make, gpus: list[hardware.Gpu]) -> None:
    """Only the GPUs that the engine takes are looked at."""
    gpus += [H200, H200, hardware.Gpu("2", "NVIDIA H200", 140 * GIB, 20 * GIB)]
    status, detail = checks.gpus(make(granted=3, settings={"engine": {"device": "auto", "tp": 3}}))
    assert status == "fail"
    assert "GPU 2 has 120 GiB free, less than engine.gpu_memory_utilization (0.9) of its memory" in detail
    assert checks.gpus(make(granted=3, settings={"engine": {"device": "auto", "tp": 2}}))[0] == "ok"
    roomy = {"engine": {"device": "auto", "tp": 3, "gpu_memory_utilization": 0.8}}
    assert checks.gpus(make(granted=3, settings=roomy))[0] == "ok"


def weigh(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    monkeypatch.setattr(checks, "loaded_bytes", lambda folder, dtype: int(gib * GIB))


@pytest.mark.parametrize(
    ("weights", "engine", "status", "said"),
    [
        (547, {}, "ok", "547.0 GiB of weights, 68.4 on each of 8 GPUs that may fill 126.0 GiB: 57.6 are left"),
        (547, {"tp": 4}, "fail", "136.8 on each of 4 GPUs that may fill 126.0 GiB; raise engine.tp, or engine.gpu_memory_utilization (0.9)"),
        (547, {"tp": 4, "gpu_memory_utilization": 0.99}, "ok", "136.8 on each of 4 GPUs that may fill 138.6 GiB: 1.8 are left"),
        (547, {"tp": 4, "args": {"cpu_offload_gb": 20}}, "ok", "9.2 are left"),
        (547, {"tp": 4, "args": {"quantization": "fp8"}}, "warn", "before engine.args.quantization"),
    ],
)  # fmt: skip
def test_weights_on_gpus(
    make: Make, gpus: list[hardware.Gpu], monkeypatch: pytest.MonkeyPatch, weights: float, engine: dict[str, Any], status: str, said: str
) -> None:  # fmt: skip
    gpus += [H200] * 8
    weigh(monkeypatch, weights)
    found = checks.memory(make(granted=8, settings={"engine": {"device": "auto", "tp": 8} | engine}))
    assert found[0] == status
    assert said in found[1]


def test_weights_wait_for_the_gpus(make: Make, gpus: list[hardware.Gpu]) -> None:
    gpus += [H200] * 2
    with pytest.raises(Skip, match="the check 'GPUs' did not pass"):
        checks.memory(make(granted=2, settings=ON_GPUS))


@pytest.mark.parametrize(
    ("weights", "cache", "status", "said"),
    [
        (5, 2, "ok", "5.0 GiB of weights and 2 GiB of KV cache; 8.0 of 16.0 GiB are free"),
        (7, 2, "warn", "lower engine.kv_cache_gib or end other programs"),
        (17, 2, "fail", "take a smaller target"),
    ],
)
def test_weights_in_main_memory(
    make: Make, monkeypatch: pytest.MonkeyPatch, weights: float, cache: float, status: str, said: str
) -> None:
    weigh(monkeypatch, weights)
    main = type("Memory", (), {"total": 16 * GIB, "available": 8 * GIB})()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: main)
    found = checks.memory(make(settings={"engine": {"kv_cache_gib": cache}}))
    assert found[0] == status
    assert said in found[1]


def safetensors(path: Path, **tensors: tuple[str, list[int], int]) -> None:
    """The head of a safetensors file: name to (dtype, shape, bytes); what it would hold is left out."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape, size) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def test_what_a_checkpoint_weighs_once_it_is_loaded(tmp_path: Path) -> None:
    """In the precision asked for, but for a quantised one; files that the index does not name are another copy."""
    (tmp_path / "config.json").write_text("{}")
    safetensors(tmp_path / "model-1.safetensors", a=("F32", [10], 40), b=("BF16", [10], 20))
    safetensors(tmp_path / "model-2.safetensors", c=("I32", [10], 40))
    assert loaded_bytes(tmp_path, "bfloat16") == 20 + 20 + 40
    assert loaded_bytes(tmp_path, "float32") == 40 + 40 + 40
    change_config(tmp_path, text_config={"quantization_config": {"quant_method": "x"}})
    assert loaded_bytes(tmp_path, "float32") == 40 + 20 + 40
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert loaded_bytes(tmp_path, "float32") == 40 + 20


def test_the_tiny_models_own_weight(make: Make, llama: Path) -> None:
    files = list(llama.glob("*.safetensors"))
    bytes_on_disk = sum(file.stat().st_size for file in files)
    assert 0.9 * bytes_on_disk < loaded_bytes(llama, "float32") <= bytes_on_disk
    assert loaded_bytes(llama, "bfloat16") == loaded_bytes(llama, "float32") // 2


def test_a_store_that_cannot_be_written(make: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DraftsmithError, match=r"file/store: cannot be written .*extract\.store"):
        checks.store_room(make(settings={"extract": {"store": str(tmp_path / "file/store")}}))


def stored(tmp_path: Path, subject: Any, rows: list[list[int]]) -> Path:
    """A store in which these rows lie, as the run would look for them."""
    described = subject.target
    key = store.fingerprint(described["states_fingerprint"], subject.layers, "float32", {}, "target")
    made = {name: torch.ones(sum(map(len, rows)), *rest) for name, rest in (("aux", (3, 64)), ("final", (64,)))}
    made["offsets"] = torch.tensor([0, *accumulate(map(len, rows))])
    made["token_ids"] = torch.tensor([token for row in rows for token in row], dtype=torch.int32)
    header = store.BatchHeader(
        fingerprint=key, target="t", layers=subject.layers, dtype="float32", hidden_size=64, rows=[store.row_id(row) for row in rows],
        lengths=[len(row) for row in rows], checksums=["0"] * len(rows), vllm="0",
    )  # fmt: skip
    folder = tmp_path / "store" / key
    folder.mkdir(parents=True)
    (folder / store.batch_name(header.rows)).write_bytes(batch_bytes(header, made))
    return folder


@pytest.mark.parametrize("what", ["key", "staging"])
def test_a_store_that_cannot_be_written_and_lacks_nothing(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Another user's, say, from which a draft is trained."""
    rows = [[1, 2, 3], [4, 5]]
    subject = make(rows=rows)
    folder = stored(tmp_path, subject, rows)
    (folder / ".staging").mkdir()
    closed = {"key": folder, "staging": folder / ".staging"}[what]
    touch = Path.touch

    def refuse(path: Path, *rest: Any) -> None:
        if path.parent == closed:
            raise OSError(errno.EROFS, "Read-only file system")
        touch(path, *rest)

    monkeypatch.setattr(Path, "touch", refuse)
    assert checks.store_room(subject) == ("ok", f"{folder}: it cannot be written, and holds all 2 rows")
    more = make(rows=[*rows, [6]])
    with pytest.raises(DraftsmithError) as error:
        checks.store_room(more)
    assert str(error.value) == (
        f"{closed}: cannot be written (Read-only file system); name another folder in the config key extract.store"
    )


def test_a_file_in_the_place_of_the_fingerprints_folder(make: Make, tmp_path: Path) -> None:
    subject = make()
    key = store.fingerprint(subject.target["states_fingerprint"], subject.layers, "float32", {}, "target")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / key).write_text("")
    with pytest.raises(DraftsmithError, match=rf"store/{key}: cannot be written \(File exists\); name another folder"):
        checks.store_room(subject)


def test_weights_that_changed_since_they_were_described(make: Make, model: Path) -> None:
    subject = make(model)
    (file,) = model.glob("*.safetensors")
    size = file.stat().st_size
    os.truncate(file, size - 1)
    with pytest.raises(DraftsmithError, match=rf"is {size - 1} bytes long and should be {size}; complete the download"):
        checks.memory(subject)
    os.truncate(file, 20)
    with pytest.raises(DraftsmithError, match="not a safetensors file; fetch it again"):
        checks.memory(subject)
    file.unlink()
    with pytest.raises(DraftsmithError, match=r"holds no \.safetensors files"):
        checks.memory(subject)


def test_a_config_that_broke_since_it_was_read(make: Make, model: Path) -> None:
    subject = make(model)
    (model / "config.json").write_text("{")
    with pytest.raises(DraftsmithError, match=r"config\.json: not valid JSON .*; fetch the checkpoint again"):
        checks.memory(subject)
    with pytest.raises(DraftsmithError, match=r"config\.json: not valid JSON .*; fetch the checkpoint again"):
        check_layers(subject)


def test_room_on_the_disk(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five tokens of (three layers and the final state) x 64 x 4 bytes."""
    need = int(5 * (4 * 64 * 4 + 4) * 1.01) + (64 << 20)
    for free, status in ((need, "ok"), (need - 1, "fail")):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: type("Usage", (), {"free": free})())
        found = checks.store_room(make())
        assert found[0] == status
        assert "0 of 2 rows are there" in found[1]
    assert found[1].endswith("free some, or name another folder in extract.store")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": need - 1000})())
    assert checks.store_room(make(settings={"extract": {"storage": "fp8"}}))[0] == "ok", "float8 takes less"


def test_the_store_waits_for_the_layers(make: Make) -> None:
    with pytest.raises(Skip, match="the check 'layers' did not pass"):
        checks.store_room(make(settings={"target": {"layers": [1, 99]}}))
