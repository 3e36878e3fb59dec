"""What the writers put down is what the store reads, and what is broken is not written."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith import store
from draftsmith.extract_shard.buffers import OpenBatch, Ring
from draftsmith.extract_shard.writer import Writer

LAYERS, WIDTH = [1, 3], 8
ROWS = [[5, 6, 7], [8, 9], [9, 10]]
IDS = [store.row_id(row) for row in ROWS]


def ring(dtype: str = "float32", storage: store.Storage = "plain", in_writing: int = 2) -> Ring:
    def header(rows: list[str], lengths: list[int], checksums: list[str]) -> store.BatchHeader:
        return store.BatchHeader(
            fingerprint="key", target="t", layers=LAYERS, dtype=dtype, storage=storage, hidden_size=WIDTH,
            rows=rows, lengths=lengths, checksums=checksums, vllm="x",
        )  # fmt: skip

    return Ring(header, 1 << 14, 64, False, in_writing)


def writer(folder: Path, failures: list[Any], **kind: Any) -> Writer:
    threads = kind.pop("threads", 1)
    return Writer(folder, ring(**kind), threads, lambda error, rows, stage: failures.append((str(error), rows, stage)))


def fill(batch: OpenBatch, rows: list[list[int]], seed: int = 0) -> None:
    random = torch.Generator().manual_seed(seed)
    states = {name: torch.randn(batch.views[name].shape, generator=random) for name in ("aux", "final")}
    for name, values in states.items():
        if batch.views[name].dtype == torch.float8_e4m3fn:
            number, scale = store.quantise(values)
            batch.views[name].copy_(number)
            batch.views[f"{name}_scale"].copy_(scale)
        else:
            batch.views[name].copy_(values)
    batch.views["token_ids"].copy_(torch.tensor([token for row in rows for token in row], dtype=torch.int32))
    batch.peaks.fill_(1.0)
    batch.filled = list(batch.lengths)


@pytest.mark.parametrize(("dtype", "storage"), [("float32", "plain"), ("bfloat16", "plain"), ("bfloat16", "fp8")])
def test_a_batch_comes_back_as_it_was(tmp_path: Path, dtype: str, storage: store.Storage) -> None:
    failures: list[Any] = []
    out = writer(tmp_path, failures, dtype=dtype, storage=storage)
    batch = out.ring.open(IDS, [3, 2, 2])
    fill(batch, ROWS)
    kept = {name: view.clone() for name, view in batch.views.items()}
    out.submit(batch)
    out.drain()
    assert failures == []
    reader = store.StoreReader(tmp_path, {row: [store.batch_name(IDS), place] for place, row in enumerate(IDS)})
    third = reader.row(IDS[2])
    assert third.token_ids.tolist() == [9, 10]
    assert third.aux.dtype == getattr(torch, dtype)
    expected = {name: kept[name][5:7] for name in ("aux", "final")}
    if storage == "fp8":
        expected = {
            name: store.dequantise(kept[name][5:7], kept[f"{name}_scale"][5:7], torch.bfloat16) for name in expected
        }
    assert torch.equal(third.aux, expected["aux"])
    assert torch.equal(third.final, expected["final"])


@pytest.mark.parametrize("storage", ["plain", "fp8"])
@pytest.mark.parametrize(
    ("value", "what"), [(float("nan"), "NaN or infinite"), (float("inf"), "NaN or infinite"), (0.0, "all-zero")]
)
def test_a_broken_row_is_left_out_and_the_others_are_written(
    tmp_path: Path, value: float, what: str, storage: store.Storage
) -> None:
    failures: list[Any] = []
    out = writer(tmp_path, failures, storage=storage)
    batch = out.ring.open(IDS, [3, 2, 2])
    fill(batch, ROWS)
    batch.peaks[4] = value
    scale = batch.views["aux_scale"][5:7].clone() if storage == "fp8" else None
    aux = batch.views["aux"][5:7].clone()
    out.submit(batch)
    out.drain()
    assert failures == [(f"{what} hidden state at 1 of 2 tokens, the first at token 1", [IDS[1]], "validate")]
    kept = [IDS[0], IDS[2]]
    reader = store.StoreReader(tmp_path, {row: [store.batch_name(kept), place] for place, row in enumerate(kept)})
    expected = aux if scale is None else store.dequantise(aux, scale, torch.float32)
    assert torch.equal(reader.row(IDS[2]).aux, expected)
    assert reader.row(IDS[0]).token_ids.tolist() == ROWS[0]


def test_nothing_is_written_when_all_rows_are_broken(tmp_path: Path) -> None:
    failures: list[Any] = []
    out = writer(tmp_path, failures)
    batch = out.ring.open(IDS, [3, 2, 2])
    fill(batch, ROWS)
    batch.peaks.fill_(float("nan"))
    out.submit(batch)
    out.drain()
    assert [rows for _, rows, _ in failures] == [[row] for row in IDS]
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    failures: list[Any] = []
    out = writer(tmp_path / "missing", failures)
    batch = out.ring.open(IDS[:1], [3])
    fill(batch, ROWS[:1])
    out.submit(batch)
    with pytest.raises(FileNotFoundError):
        out.drain()
    assert failures[0][1:] == (IDS[:1], "write")
    assert not (tmp_path / "missing").exists()


def test_a_disk_that_takes_not_even_the_record_of_its_error_hangs_nobody(tmp_path: Path) -> None:
    """On a full disk the batch and the ledger's entry fail alike; `drain` still ends, with the cause."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    def drained() -> None:
        with pytest.raises(OSError, match="No space left"):
            out.drain()

    out = writer(tmp_path, [])
    out.failed = full
    out._write = full  # type: ignore[method-assign]
    batch = out.ring.open(IDS[:1], [3])
    fill(batch, ROWS[:1])
    out.submit(batch)
    done = threading.Thread(target=drained, daemon=True)
    done.start()
    done.join(10)
    assert not done.is_alive()
    assert isinstance(out.error, OSError)
    assert out.error.errno == 28


def test_a_disk_that_stands_still_stops_the_engine_and_never_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    out = writer(tmp_path, [], threads=2)
    write = out._write

    def slow(batch: OpenBatch) -> None:
        assert gate.wait(10)
        write(batch)

    monkeypatch.setattr(out, "_write", slow)
    for row, tokens in zip(IDS[:2], ROWS[:2], strict=True):
        batch = out.ring.open([row], [len(tokens)])
        fill(batch, [tokens])
        out.submit(batch)
    opened = threading.Event()
    waiting = threading.Thread(target=lambda: (out.ring.open([IDS[2]], [2]), opened.set()))
    waiting.start()
    assert not opened.wait(0.2)
    gate.set()
    assert opened.wait(10)
    waiting.join()
    assert out.ring.made == 2
    assert out.ring.blocked_seconds > 0.1


def test_buffers_made_ahead_are_used_first() -> None:
    buffers = ring()
    buffers.prepare(2)
    first, second = buffers.open(IDS[:1], [3]), buffers.open(IDS[1:2], [2])
    assert buffers.made == 2
    assert first.buffer.data.data_ptr() != second.buffer.data.data_ptr()
