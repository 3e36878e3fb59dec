"""Batch files: what was written is read back, and nothing damaged or foreign is ever taken for it."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from draftsmith import store
from draftsmith.store import BatchHeader, StoreError, StoreReader

LAYERS, WIDTH = [1, 2, 5], 6
KEY = store.fingerprint("target", LAYERS, "float32")
# Three rows of 1, 4 and 2 tokens.
ROWS = [[7], [3, 1, 4, 1], [5, 9]]
IDS = [store.row_id(tokens) for tokens in ROWS]


def states(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Aux [L, A, H] and final [L, H] states of each row."""
    generator = torch.Generator().manual_seed(0)
    aux = [torch.randn(len(tokens), len(LAYERS), WIDTH, generator=generator).to(dtype) for tokens in ROWS]
    final = [torch.randn(len(tokens), WIDTH, generator=generator).to(dtype) for tokens in ROWS]
    return aux, final


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def write_batch(folder: Path, dtype: torch.dtype = torch.float32, key: str = KEY) -> Path:
    """A batch file put together by hand after :func:`store.layout`."""
    aux, final = states(dtype)
    header = BatchHeader(
        fingerprint=key, target="target", layers=LAYERS, dtype=str(dtype).removeprefix("torch."), hidden_size=WIDTH,
        rows=IDS, lengths=[len(tokens) for tokens in ROWS],
        checksums=[store.checksum(raw(a), raw(f)) for a, f in zip(aux, final, strict=True)], vllm="0",
    )  # fmt: skip
    head, places = store.layout(header)
    content = bytearray(max(at + size for at, size in places.values()))
    content[: len(head)] = head
    for name, values in {
        "aux": raw(torch.cat(aux)),
        "final": raw(torch.cat(final)),
        "token_ids": struct.pack("<7i", *(token for row in ROWS for token in row)),
        "offsets": struct.pack("<4q", 0, 1, 5, 7),
    }.items():
        at, size = places[name]
        assert len(values) == size
        content[at : at + size] = values
    path = folder / store.batch_name(IDS)
    path.write_bytes(content)
    return path


def reader(path: Path) -> StoreReader:
    return StoreReader(path.parent, {row: (path.name, place) for place, row in enumerate(IDS)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_round_trip(tmp_path: Path, dtype: torch.dtype) -> None:
    opened = reader(write_batch(tmp_path, dtype))
    aux, final = states(dtype)
    for place in (2, 0, 1):
        row = opened.row(IDS[place])
        assert row.token_ids.dtype == torch.int32
        assert row.token_ids.tolist() == ROWS[place]
        assert row.aux.dtype == row.final.dtype == dtype
        torch.testing.assert_close(row.aux, aux[place], rtol=0, atol=0)
        torch.testing.assert_close(row.final, final[place], rtol=0, atol=0)


def test_any_safetensors_reader_reads_it(tmp_path: Path) -> None:
    with safe_open(write_batch(tmp_path, torch.bfloat16), "pt") as file:
        assert sorted(file.keys()) == ["aux", "final", "offsets", "token_ids"]
        aux, final = states(torch.bfloat16)
        torch.testing.assert_close(file.get_tensor("aux"), torch.cat(aux), rtol=0, atol=0)
        torch.testing.assert_close(file.get_tensor("final"), torch.cat(final), rtol=0, atol=0)
        assert file.get_tensor("offsets").tolist() == [0, 1, 5, 7]
        header = BatchHeader.model_validate_json(file.metadata()["draftsmith"])
    assert (header.layers, header.final, header.dtype) == (LAYERS, "post-norm", "bfloat16")


def test_rows_are_views_onto_the_file(tmp_path: Path) -> None:
    opened = reader(write_batch(tmp_path))
    first, again = opened.row(IDS[1]), opened.row(IDS[1])
    assert first.aux.data_ptr() == again.aux.data_ptr()
    assert first.aux.data_ptr() % 4 == 0


def test_scan_finds_every_row(tmp_path: Path) -> None:
    path = write_batch(tmp_path)
    index = store.scan(tmp_path, KEY)
    assert index.rows == {IDS[0]: (path.name, 0), IDS[1]: (path.name, 1), IDS[2]: (path.name, 2)}
    assert index.tokens == {IDS[0]: 1, IDS[1]: 4, IDS[2]: 2}
    assert index.bad == {}


def test_half_written_files_are_not_looked_at(tmp_path: Path) -> None:
    write_batch(tmp_path).rename(tmp_path / ".batch.safetensors.tmp")
    assert store.scan(tmp_path, KEY).rows == {}


@pytest.mark.parametrize("left", [0, 4, 8, 100, -1])
def test_a_file_cut_short_is_passed_over(tmp_path: Path, left: int) -> None:
    path = write_batch(tmp_path)
    path.write_bytes(path.read_bytes()[:left])
    index = store.scan(tmp_path, KEY)
    assert index.rows == {}
    assert list(index.bad) == [path.name]
    assert str(path) in index.bad[path.name]
    assert "its rows are computed again" in index.bad[path.name]


def test_a_file_with_bytes_too_many_is_passed_over(tmp_path: Path) -> None:
    path = write_batch(tmp_path)
    path.write_bytes(path.read_bytes() + b"\0")
    assert path.name in store.scan(tmp_path, KEY).bad


def test_a_zeroed_file_is_passed_over(tmp_path: Path) -> None:
    """What is left of a file whose blocks a crash never wrote."""
    path = write_batch(tmp_path)
    path.write_bytes(bytes(path.stat().st_size))
    assert path.name in store.scan(tmp_path, KEY).bad


def test_a_file_of_another_fingerprint_is_passed_over(tmp_path: Path) -> None:
    path = write_batch(tmp_path, key=store.fingerprint("another", LAYERS, "float32"))
    index = store.scan(tmp_path, KEY)
    assert index.rows == {}
    assert "belongs to the fingerprint" in index.bad[path.name]


def test_a_file_of_another_format_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_batch(tmp_path)
    monkeypatch.setattr(store, "FORMAT_VERSION", 2)
    assert "has format 1, this version reads 2" in store.scan(tmp_path, KEY).bad[path.name]


@pytest.mark.parametrize("tensor", ["aux", "final", "token_ids"])
def test_a_flipped_bit_is_found_in_its_row_alone(tmp_path: Path, tensor: str) -> None:
    path = write_batch(tmp_path)
    header, places = store.read_header(path)
    at, size = places[tensor]
    content = bytearray(path.read_bytes())
    # Row 1 is tokens 1 to 4 of 7.
    content[at + 2 * size // 7] ^= 0x10
    path.write_bytes(content)
    opened = reader(path)
    opened.row(IDS[0])
    opened.row(IDS[2])
    with pytest.raises(StoreError) as error:
        opened.row(IDS[1])
    assert str(path) in str(error.value)
    assert header.rows[1] in str(error.value)
    assert "--forcerun extract_shard" in str(error.value)


def test_zeroed_states_are_found(tmp_path: Path) -> None:
    """The head is whole, as it was written first, and the states never came to the disk."""
    path = write_batch(tmp_path)
    _, places = store.read_header(path)
    content = bytearray(path.read_bytes())
    at, size = places["aux"]
    content[at : at + size] = bytes(size)
    path.write_bytes(content)
    with pytest.raises(StoreError):
        reader(path).row(IDS[0])


def test_a_row_that_is_not_in_the_manifest(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="row 00 is not in the manifest; run extract_shard again"):
        reader(write_batch(tmp_path)).row("00")


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    path = write_batch(tmp_path)
    opened = reader(path)
    path.unlink()
    with pytest.raises(StoreError, match=path.name):
        opened.row(IDS[0])


def test_a_reader_travels_to_a_worker_process(tmp_path: Path) -> None:
    opened = reader(write_batch(tmp_path))
    opened.row(IDS[0])
    assert pickle.loads(pickle.dumps(opened)).row(IDS[1]).token_ids.tolist() == ROWS[1]


def test_identities_by_hand() -> None:
    """Worked out with sha256sum from the bytes 01 00 00 00 02 00 00 00."""
    assert store.row_id([1, 2]) == "34fb5c825de7ca4aea6e712f19d439c1"
    assert store.row_id([1, 2]) != store.row_id([2, 1])


@pytest.mark.parametrize(
    "other",
    [("another", [1, 2, 5], "float32"), ("target", [1, 2, 6], "float32"), ("target", [1, 2, 5], "bfloat16")],
)
def test_all_that_changes_the_bytes_changes_the_fingerprint(other: tuple[str, list[int], str]) -> None:
    assert store.fingerprint(*other) != KEY


def test_bytes_per_token() -> None:
    assert store.bytes_per_token(3, 7168, "bfloat16") == 4 * 7168 * 2
