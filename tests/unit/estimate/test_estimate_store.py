"""Bytes and files of the store: by hand, by the demo's real store, and by a file that the writer itself has written."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from targets import DEMO, KIMI, SMOLLM, given

from draftsmith import store
from draftsmith.estimate import storage


def test_kimi_takes_57344_bytes_a_token_in_bfloat16(tmp_path: Path) -> None:
    target = given(tmp_path, KIMI, target={"layers": [2, 30, 58]})
    # (3 layers + the final state) x 7168 x 2 bytes; as float8 7168 x 1 and 4 for a scale.
    assert storage.per_token(target, "target") == 4 * 7168 * 2 == 57_344
    assert storage.per_token(target, "bf16") == 57_344
    assert storage.per_token(target, "fp8") == 4 * (7168 + 4) == 28_688
    by_kind = {each.storage: each for each in storage.stores(target, [4096] * 10, 1)}
    # What is not states is small: 4 bytes of id a token, 8 of offset a row, and a head of about a kilobyte a file.
    states = 10 * 4096 * 57_344
    assert states < by_kind["target"].bytes < states * 1.001
    assert by_kind["target"].chosen
    assert not by_kind["fp8"].chosen


def test_the_demos_real_bytes_within_two_per_cent(tmp_path: Path) -> None:
    run = DEMO["later"]
    target = given(tmp_path, SMOLLM, device="cpu", extract={"batch_tokens": 2048})
    found = next(each for each in storage.stores(target, run["lengths"], 1) if each.chosen)
    assert found.bytes_per_token == 4 * 576 * 4
    assert found.files == run["store"]["files"] == 56
    assert found.bytes == pytest.approx(run["store"]["bytes"], rel=0.0001)


def test_files_by_hand(tmp_path: Path) -> None:
    target = given(tmp_path, SMOLLM, device="cpu", extract={"batch_tokens": 10})
    lengths = [4, 4, 4, 12, 1, 9, 2]
    assert storage.batches(target, "target", lengths, 1) == [[4, 4], [4], [12], [1, 9], [2]]
    # Two shards take every second of these packs, and pack what they have anew: 4 4 12 2, and 4 1 9.
    assert storage.batches(target, "target", lengths, 2) == [[4, 4], [12], [2], [4, 1], [9]]
    assert [each.files for each in storage.stores(target, lengths, 2)] == [5, 5, 5]


def test_many_files_are_taken_to_be_like_some(tmp_path: Path) -> None:
    target = given(tmp_path, SMOLLM, device="cpu", extract={"batch_tokens": 100})
    lengths = [20 + place % 70 for place in range(3000)]
    packed = storage.batches(target, "target", lengths, 1)
    assert len(packed) > 1000
    exact = sum(storage.layout(target, "target", batch)[1] for batch in packed)
    assert storage.stores(target, lengths, 1)[0].bytes == pytest.approx(exact, rel=0.0005)


@pytest.mark.parametrize("kind", ["target", "fp8"])
def test_a_file_is_as_large_as_the_writer_makes_it(tmp_path: Path, kind: str) -> None:
    from draftsmith.extract_shard.buffers import Ring
    from draftsmith.extract_shard.writer import Writer

    small = SMOLLM | {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 8}
    target = given(tmp_path, small, device="cpu", extract={"storage": kind})
    dtype, kept = store.stored_as(kind, "float32")
    lengths = [5, 17, 1]

    def header(rows: list[str], sizes: list[int], checksums: list[str]) -> store.BatchHeader:
        return store.BatchHeader(
            fingerprint="f" * 16, target="t" * 64, layers=target.layers, dtype=dtype, storage=kept, hidden_size=64, rows=rows,
            lengths=sizes, checksums=checksums, vllm=storage._vllm(),
        )  # fmt: skip

    ids = [store.row_id(range(length)) for length in lengths]
    head, whole = storage.layout(target, kind, lengths)
    ring = Ring(header, whole - head, sum(lengths), pinned=False, in_writing=1)
    lock = threading.Lock()
    writer = Writer(tmp_path, ring, 1, lambda *failure: lock.acquire(blocking=False))
    batch = ring.open(ids, lengths)
    for view in batch.views.values():
        if view.dtype != torch.int64:
            view.copy_(torch.ones(view.shape))
    batch.peaks.fill_(1.0)
    batch.filled = list(lengths)
    writer.submit(batch)
    writer.drain()
    assert not lock.locked()
    written = list(tmp_path.glob("*.safetensors"))
    assert [path.stat().st_size for path in written] == [whole]
