"""No byte of a file's head can change unseen, and what is wrong with it is told apart."""

from __future__ import annotations

from pathlib import Path

import pytest
from batches import flip, flipped_header, of_format_1, write_batch

from draftsmith import store
from draftsmith.store import DamagedFile, OtherFormat


@pytest.mark.parametrize("storage", ["plain", "fp8"])
def test_no_byte_of_the_head_can_change_unseen(tmp_path: Path, storage: store.Storage) -> None:
    path = write_batch(tmp_path, storage=storage)
    _, places = store.read_header(path)
    for at in range(min(start for start, _ in places.values())):
        flip(path, at)
        with pytest.raises(DamagedFile) as error:
            store.read_header(path)
        assert str(path) in str(error.value)
        flip(path, at)
    store.read_header(path)


def test_a_head_that_reads_well_and_says_something_else(tmp_path: Path) -> None:
    path = write_batch(tmp_path)
    flipped_header(path)
    with pytest.raises(DamagedFile, match="its head does not have its checksum"):
        store.read_header(path)


def test_a_file_of_another_format_is_told_from_a_damaged_one(tmp_path: Path) -> None:
    path = write_batch(tmp_path)
    of_format_1(path)
    with pytest.raises(OtherFormat, match="has format 1, this version reads 2"):
        store.read_header(path)


def test_a_file_that_may_not_be_read_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_batch(tmp_path)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(store.StoreError, match="may not be read") as error:
        store.read_header(path)
    assert not isinstance(error.value, DamagedFile)
