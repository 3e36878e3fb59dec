"""Batch buffers: what is written is what the store reads, and what is broken is not written."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith import store
from draftsmith.extract_shard.buffers import OpenBatch, Writer

LAYERS, WIDTH = [1, 3], 8


def writer(folder: Path, failures: list[Any], dtype: str = "float32", threads: int = 1) -> Writer:
    def header(rows: list[str], lengths: list[int], checksums: list[str]) -> store.BatchHeader:
        return store.BatchHeader(
            fingerprint="key",
            target="t",
            layers=LAYERS,
            dtype=dtype,
            hidden_size=WIDTH,
            rows=rows,
            lengths=lengths,
            checksums=checksums,
            vllm="x",
        )

    return Writer(folder, header, 1 << 16, threads, False, lambda error, rows: failures.append((str(error), rows)))


def fill(batch: OpenBatch, rows: list[list[int]], seed: int = 0) -> None:
    random = torch.Generator().manual_seed(seed)
    batch.aux.copy_(torch.randn(batch.aux.shape, generator=random))
    batch.final.copy_(torch.randn(batch.final.shape, generator=random))
    batch.token_ids.copy_(torch.tensor([token for row in rows for token in row], dtype=torch.int32))
    batch.peaks.fill_(1.0)
    batch.filled = list(batch.lengths)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_batch_comes_back_as_it_was(tmp_path: Path, dtype: str) -> None:
    rows = [[5, 6, 7], [8], [9, 10]]
    failures: list[Any] = []
    out = writer(tmp_path, failures, dtype)
    ids = [store.row_id(row) for row in rows]
    batch = out.open(ids, [3, 1, 2])
    fill(batch, rows)
    aux, final = batch.aux.clone(), batch.final.clone()
    out.submit(batch)
    out.drain()
    assert failures == []
    name = store.batch_name(ids)
    reader = store.StoreReader(tmp_path, {row: [name, place] for place, row in enumerate(ids)})
    second = reader.row(ids[2])
    assert second.token_ids.tolist() == [9, 10]
    assert second.aux.dtype == getattr(torch, dtype)
    assert torch.equal(second.aux, aux[4:6])
    assert torch.equal(second.final, final[4:6])


@pytest.mark.parametrize(
    ("value", "what"), [(float("nan"), "NaN or infinite"), (float("inf"), "NaN or infinite"), (0.0, "all-zero")]
)
def test_a_broken_row_is_left_out_and_the_others_are_written(tmp_path: Path, value: float, what: str) -> None:
    rows = [[5, 6, 7], [8, 9], [9, 10]]
    ids = [store.row_id(row) for row in rows]
    failures: list[Any] = []
    out = writer(tmp_path, failures)
    batch = out.open(ids, [3, 2, 2])
    fill(batch, rows)
    batch.peaks[4] = value
    aux = batch.aux.clone()
    out.submit(batch)
    out.drain()
    assert len(failures) == 1
    assert failures[0][1] == [ids[1]]
    assert failures[0][0] == f"{what} hidden state at 1 of 2 tokens, the first at token 1"
    kept = [ids[0], ids[2]]
    reader = store.StoreReader(tmp_path, {row: [store.batch_name(kept), place] for place, row in enumerate(kept)})
    assert torch.equal(reader.row(ids[2]).aux, aux[5:7])
    assert reader.row(ids[0]).token_ids.tolist() == [5, 6, 7]


def test_a_write_that_fails_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    failures: list[Any] = []
    out = writer(tmp_path / "missing", failures)
    batch = out.open([store.row_id([1])], [1])
    fill(batch, [[1]])
    out.submit(batch)
    with pytest.raises(FileNotFoundError):
        out.drain()
    assert failures[0][1] == [store.row_id([1])]
    assert not (tmp_path / "missing").exists()


def test_buffers_are_reused_and_bounded_by_the_writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that stands still makes `open` wait; it never makes more buffers than open batches and writes."""
    gate = threading.Event()
    out = writer(tmp_path, [])
    write = out._write

    def slow(batch: OpenBatch) -> None:
        assert gate.wait(10)
        write(batch)

    monkeypatch.setattr(out, "_write", slow)
    for number in range(out.max_writing):
        batch = out.open([store.row_id([number])], [1])
        fill(batch, [[number]])
        out.submit(batch)
    opened = threading.Event()
    waiting = threading.Thread(target=lambda: (out.open([store.row_id([99])], [1]), opened.set()))
    waiting.start()
    assert not opened.wait(0.2)
    gate.set()
    assert opened.wait(10)
    waiting.join()
    assert out.buffers == out.max_writing
    assert out.blocked_seconds > 0.1


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
    batch = out.open([store.row_id([1])], [1])
    fill(batch, [[1]])
    out.submit(batch)
    done = threading.Thread(target=drained, daemon=True)
    done.start()
    done.join(10)
    assert not done.is_alive()
    assert isinstance(out.error, OSError)
    assert out.error.errno == 28
