"""What was written is read back, without a copy, and nothing damaged is."""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batches import DAMAGE, IDS, KEY, ROWS, WIDTH, encode, of_format_1, reader, states, write_batch
from torch.utils.data import DataLoader, Dataset

from draftsmith import store
from draftsmith.store import DamagedFile, StoreError, StoreReader
from draftsmith.store import reader as store_reader

# Tokens of row 1.
SECOND = slice(1, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_round_trip(tmp_path: Path, dtype: torch.dtype) -> None:
    opened = reader(write_batch(tmp_path, dtype=dtype))
    aux, final = states(ROWS, dtype)
    for place, part in ((2, slice(5, 7)), (0, slice(0, 1)), (1, SECOND)):
        row = opened.row(IDS[place])
        assert row.token_ids.dtype == torch.int32
        assert row.token_ids.tolist() == ROWS[place]
        assert row.aux.dtype == row.final.dtype == dtype
        assert torch.equal(row.aux, aux[part])
        assert torch.equal(row.final, final[part])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_of_float8(tmp_path: Path, dtype: torch.dtype) -> None:
    opened = reader(write_batch(tmp_path, dtype=dtype, storage="fp8"))
    aux, final = states(ROWS, dtype)
    row = opened.row(IDS[1])
    assert row.aux.dtype == row.final.dtype == dtype
    assert row.token_ids.tolist() == ROWS[1]
    # What the scales give back, to the bit, and it is near.
    assert torch.equal(row.aux, store.dequantise(*store.quantise(aux[SECOND]), dtype))
    assert torch.equal(row.final, store.dequantise(*store.quantise(final[SECOND]), dtype))
    torch.testing.assert_close(row.final.float(), final[SECOND].float(), rtol=1 / 16, atol=1e-4)


@pytest.mark.parametrize("storage", ["plain", "fp8"])
def test_the_last_state_of_a_row(tmp_path: Path, storage: store.Storage) -> None:
    batch = store.open_batch(write_batch(tmp_path, storage=storage))
    for place in range(3):
        assert torch.equal(batch.last_state(place), batch.row(place).final[-1])
        assert batch.token_ids(place).tolist() == ROWS[place]


def test_a_row_lies_in_the_map(tmp_path: Path) -> None:
    """At the very byte of the file where the layout puts it; so nothing was copied."""
    path = write_batch(tmp_path, dtype=torch.bfloat16)
    batch = store.open_batch(path)
    start = np.frombuffer(batch._map, dtype=np.uint8).ctypes.data
    _, places = store.read_header(path)
    row = batch.row(1)
    assert row.aux.data_ptr() == start + places["aux"][0] + 1 * 3 * WIDTH * 2
    assert row.final.data_ptr() == start + places["final"][0] + 1 * WIDTH * 2
    assert row.token_ids.data_ptr() == start + places["token_ids"][0] + 1 * 4


def test_a_view_shows_what_becomes_of_the_file(tmp_path: Path) -> None:
    """Pages are the file's own: were they copies, they would not change with it."""
    path = write_batch(tmp_path)
    row = reader(path).row(IDS[1])
    _, places = store.read_header(path)
    with open(path, "r+b") as file:
        os.pwrite(file.fileno(), struct.pack("<f", 1234.5), places["aux"][0] + 1 * 3 * WIDTH * 4)
    assert row.aux[0, 0, 0].item() == 1234.5


def test_rows_come_in_any_order_and_again(tmp_path: Path) -> None:
    one, other = write_batch(tmp_path), write_batch(tmp_path, [[11, 12]])
    places = {row: (one.name, place) for place, row in enumerate(IDS)} | {store.row_id([11, 12]): (other.name, 0)}
    opened = StoreReader(tmp_path, places, KEY)
    for row in (IDS[2], store.row_id([11, 12]), IDS[0], IDS[2], IDS[1]):
        assert store.row_id(opened.row(row).token_ids.numpy()) == row


def test_a_reader_maps_only_so_many_files_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux allows a process some 65,000 maps; a view keeps its own until it goes."""
    monkeypatch.setattr(store_reader, "_MAPS", 2)
    rows = [[number] for number in range(5)]
    paths = [write_batch(tmp_path, [row]) for row in rows]
    opened = StoreReader(tmp_path, {store.row_id(row): (path.name, 0) for row, path in zip(rows, paths, strict=True)})
    kept = [opened.row(store.row_id(row)) for row in rows]
    assert opened._file.cache_info().currsize == 2
    assert [row.token_ids.tolist() for row in kept] == rows
    assert torch.equal(kept[0].aux, states([rows[0]], torch.float32)[0])


class Rows(Dataset[Any]):
    """Final states by number."""

    def __init__(self, opened: StoreReader) -> None:
        self.opened = opened

    def __len__(self) -> int:
        return len(IDS)

    def __getitem__(self, index: int) -> Any:
        return os.getpid(), self.opened.row(IDS[index]).final


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_reader_travels_to_the_workers_of_a_data_loader(tmp_path: Path, context: str) -> None:
    opened = reader(write_batch(tmp_path), key=KEY)
    opened.row(IDS[0])
    loader = DataLoader(Rows(opened), batch_size=None, num_workers=1, multiprocessing_context=context)
    found = list(loader)
    assert os.getpid() not in {pid for pid, _ in found}
    assert torch.equal(torch.cat([final for _, final in found]), states(ROWS, torch.float32)[1])


def test_a_reader_is_pickled_without_its_maps(tmp_path: Path) -> None:
    opened = reader(write_batch(tmp_path), key=KEY)
    opened.row(IDS[0])
    copy = pickle.loads(pickle.dumps(opened))
    assert (copy.folder, copy.rows, copy.key) == (opened.folder, opened.rows, KEY)
    assert copy.row(IDS[1]).token_ids.tolist() == ROWS[1]


# ---- damage ----


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damage_is_never_trained_on(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """Each is met at one of the rows, told with the mend, and moved where nobody reads it again."""
    path = write_batch(tmp_path)
    opened = reader(path, key=KEY)
    damage(path)
    content = path.read_bytes()
    with pytest.raises(StoreError) as error:
        list(map(opened.row, IDS))
    text = str(error.value)
    assert text.startswith(str(path))
    assert text.endswith("snakemake with `--forcerun extract_shard` computes its rows again")
    aside = tmp_path / ".damaged" / path.name
    assert f"it is moved to {aside}" in text
    assert not path.exists()
    assert aside.read_bytes() == content
    with pytest.raises(StoreError, match="is gone, though the manifest names it"):
        reader(path, key=KEY).row(IDS[0])


@pytest.mark.parametrize("tensor", ["aux", "final", "aux_scale", "final_scale", "token_ids"])
def test_a_flipped_bit_is_found_in_its_row_alone(tmp_path: Path, tensor: str) -> None:
    path = write_batch(tmp_path, dtype=torch.bfloat16, storage="fp8")
    _, places = store.read_header(path)
    at, size = places[tensor]
    content = bytearray(path.read_bytes())
    # Row 1 is tokens 1 to 4 of 7.
    content[at + 2 * size // 7] ^= 0x10
    path.write_bytes(content)
    batch = store.open_batch(path)
    batch.row(0)
    batch.row(2)
    with pytest.raises(DamagedFile, match=IDS[1]):
        batch.row(1)


def test_offsets_that_say_something_else(tmp_path: Path) -> None:
    path = write_batch(tmp_path)
    _, places = store.read_header(path)
    with open(path, "r+b") as file:
        os.pwrite(file.fileno(), struct.pack("<q", 2), places["offsets"][0] + 8)
    with pytest.raises(DamagedFile, match="its offsets do not follow from the lengths"):
        store.open_batch(path)


def test_a_good_file_in_the_place_of_a_damaged_one_is_left_there(tmp_path: Path) -> None:
    """Another run has put it there since this one mapped the damaged file."""
    path = write_batch(tmp_path)
    opened = reader(path, key=KEY)
    opened.row(IDS[0])
    _, places = store.read_header(path)
    with open(path, "r+b") as file:
        os.pwrite(file.fileno(), b"\xff", sum(places["final"]) - 1)
    # As a publisher does: another file takes the name, this one stays mapped.
    write_batch(tmp_path)
    with pytest.raises(StoreError, match="another process has moved or replaced it since"):
        opened.row(IDS[2])
    assert path.exists()
    assert reader(path, key=KEY).row(IDS[2]).token_ids.tolist() == ROWS[2]


def test_a_store_that_cannot_be_written_still_tells_the_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_batch(tmp_path)
    os.truncate(path, 100)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(
        StoreError, match=r"cannot be moved to .*/\.damaged \(Permission denied\); move it there; snakemake with"
    ):
        reader(path).row(IDS[0])
    assert path.exists()


def test_a_file_of_an_older_format_is_no_damage(tmp_path: Path) -> None:
    """A manifest of a former version names it: it stays where it is."""
    path = write_batch(tmp_path)
    of_format_1(path)
    with pytest.raises(
        StoreError, match=r"has format 1, this version reads 2; snakemake with `--forcerun extract_shard`"
    ):
        reader(path).row(IDS[0])
    assert path.exists()


def test_a_row_that_is_not_in_the_manifest(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="row 00 is not in the manifest; run extract_shard again"):
        reader(write_batch(tmp_path)).row("00")


def test_a_head_and_a_map_are_of_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of another vLLM replaces the file just after its head was read: the data then begin elsewhere."""
    path = write_batch(tmp_path)
    read = store_reader.read_head

    def replaced(*args: Any) -> Any:
        found = read(*args)
        name, content = encode(vllm="0.32.0+a-name-that-is-long-enough-to-move-all-the-data-by-another-64-bytes")
        (tmp_path / ".tmp").write_bytes(content)
        (tmp_path / ".tmp").replace(tmp_path / name)
        return found

    monkeypatch.setattr(store_reader, "read_head", replaced)
    assert reader(path, key=KEY).row(IDS[1]).token_ids.tolist() == ROWS[1]
