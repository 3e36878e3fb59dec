"""Every byte of a file is vouched for by some checksum, and a whole store can be read against them."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import DAMAGE, IDS, KEY, ROWS, flip, flipped_data, of_format_1, reader, write_batch

from draftsmith import store
from draftsmith.errors import DraftsmithError
from draftsmith.files import write_json
from draftsmith.store import DamagedFile, UnreadableFile, head, verification
from draftsmith.store.audit import Audit, audit
from draftsmith.store.tables import Progress

KINDS = [(torch.float32, "plain"), (torch.bfloat16, "plain"), (torch.bfloat16, "fp8")]


@pytest.mark.parametrize(("dtype", "storage"), KINDS)
def test_no_byte_can_change_unseen(tmp_path: Path, dtype: torch.dtype, storage: store.Storage) -> None:
    path = write_batch(tmp_path, dtype=dtype, storage=storage)
    assert verification.verify(path, KEY).rows == IDS
    for at in range(path.stat().st_size):
        flip(path, at)
        with pytest.raises(DamagedFile):
            verification.verify(path, KEY)
        flip(path, at)
    verification.verify(path, KEY)


@pytest.mark.parametrize(("dtype", "storage"), KINDS)
def test_states_are_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, storage: store.Storage
) -> None:
    """Of 10 bytes here, which divide no row; the reader takes them in one, and both come to the same checksum."""
    monkeypatch.setattr(verification, "_PIECE", 10)
    verification.verify(write_batch(tmp_path, dtype=dtype, storage=storage), KEY)


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_examine_tells_without_raising(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = write_batch(tmp_path)
    damage(path)
    verdict = verification.examine(path, KEY)
    assert verdict is not None
    assert verdict.header is None
    assert isinstance(verdict.error, DamagedFile)
    assert str(verdict.error).startswith(str(path))


FAULTS = {
    errno.EIO: "look after its disk or file server, or, if it never can be read, move it to ",
    errno.ESTALE: "look after its disk or file server, or, if it never can be read, move it to ",
    errno.EMFILE: r"raise the limit of open files \(ulimit -n\), or name fewer threads",
    errno.EACCES: "let its owner make the store readable for all who share it",
}


class Broken(io.BytesIO):
    """A file of which a read ends in an error of the operating system."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self._error = OSError(code, os.strerror(code))

    def read(self, *_: object) -> bytes:
        raise self._error


@pytest.mark.parametrize("code", FAULTS, ids=lambda code: errno.errorcode[code])
@pytest.mark.parametrize("where", ["stat", "open", "head", "states", "map"])
def test_what_cannot_be_read_is_no_damage_and_stays_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, where: str
) -> None:
    """Faults of the machine: the same file is sound when it is read again."""
    path = write_batch(tmp_path)
    opened = reader(path, key=KEY)

    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as broken:
        if where == "stat":
            stat = type(path).stat
            broken.setattr(type(path), "stat", lambda one, **how: fail() if one == path else stat(one, **how))
        elif where == "open":
            broken.setattr(head, "open", fail, raising=False)
        elif where == "head":
            broken.setattr(head, "open", lambda *_: Broken(code), raising=False)
        elif where == "states":
            broken.setattr(verification, "_compare", fail)
        else:
            broken.setattr("mmap.mmap", fail)
        if where in ("open", "head", "map"):
            with pytest.raises(UnreadableFile, match=FAULTS[code]) as error:
                opened.row(IDS[0])
            assert store.AGAIN not in str(error.value)
        if where != "map":
            with pytest.raises(UnreadableFile, match=FAULTS[code]):
                store.trusted(tmp_path, KEY, IDS)
        if where in ("open", "head"):
            with pytest.raises(UnreadableFile, match=FAULTS[code]):
                store.scan(tmp_path, KEY)
    assert path.exists()
    assert not (tmp_path / ".damaged").exists()
    assert set(store.trusted(tmp_path, KEY, IDS).rows) == set(IDS)


def test_a_file_that_cannot_be_read_again_is_not_moved_by_the_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_batch(tmp_path)
    flipped_data(path)
    opened = reader(path, key=KEY)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(verification, "_compare", fail)
    with pytest.raises(store.StoreError, match=r"do not have their checksum, and now .*Input/output error"):
        opened.row(IDS[2])
    assert path.exists()


def test_a_folder_with_the_name_of_a_batch_is_foreign(tmp_path: Path) -> None:
    (tmp_path / "ab.safetensors").mkdir()
    assert "is a folder; it is moved to" in store.trusted(tmp_path, KEY, IDS).bad["ab.safetensors"]
    assert (tmp_path / ".damaged" / "ab.safetensors").is_dir()


# ---- a whole store ----


def store_of_two(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A store with two files of one fingerprint, and one of another."""
    other = store.fingerprint("another", [1], "float32")
    write_batch(tmp_path / "store" / other, key=other)
    return tmp_path / "store", write_batch(tmp_path / "store" / KEY), write_batch(tmp_path / "store" / KEY, [[11, 12]])


def read(folder: Path, manifest: Path | None = None) -> Audit:
    with Progress() as progress:
        return audit(folder, manifest, 2, progress)


def manifest(tmp_path: Path, rows: dict[str, list[Any]], **more: Any) -> Path:
    write_json(tmp_path / "manifest.json", {"fingerprint": KEY, "rows": rows} | more)
    return tmp_path / "manifest.json"


def test_a_sound_store(tmp_path: Path) -> None:
    folder, one, two = store_of_two(tmp_path)
    found = read(folder)
    assert (found.sound, found.files, found.missing, found.manifest_rows) == (True, 3, [], None)
    assert {each.fingerprint: (each.files, each.rows, each.tokens, each.damaged) for each in found.fingerprints} == {
        KEY: (2, 4, 9, {}),
        store.fingerprint("another", [1], "float32"): (1, 3, 7, {}),
    }
    (mine,) = [each for each in found.fingerprints if each.fingerprint == KEY]
    assert mine.bytes == one.stat().st_size + two.stat().st_size


def test_one_fingerprint_alone(tmp_path: Path) -> None:
    folder, *_ = store_of_two(tmp_path)
    assert [each.fingerprint for each in read(folder / KEY).fingerprints] == [KEY]


def test_damage_is_named_and_left_where_it_is(tmp_path: Path) -> None:
    folder, path, _ = store_of_two(tmp_path)
    flipped_data(path)
    found = read(folder)
    assert not found.sound
    assert [list(each.damaged) for each in found.fingerprints if each.fingerprint == KEY] == [[path.name]]
    assert path.exists()


def test_what_was_read_need_not_be_read_again_and_what_is_damaged_is(tmp_path: Path) -> None:
    """Even where the journal vouched for the file as it is."""
    folder, path, other = store_of_two(tmp_path)
    flipped_data(path)
    store.Journal(folder / KEY).add(path)
    assert set(IDS) <= set(store.trusted(folder / KEY, KEY, IDS).rows)
    read(folder)
    assert {name for name, _ in store.Journal(folder / KEY).read()} == {other.name}
    assert set(store.trusted(folder / KEY, KEY, IDS).rows) == {store.row_id([11, 12])}


def test_files_of_another_format_are_counted_and_are_no_damage(tmp_path: Path) -> None:
    folder, path, _ = store_of_two(tmp_path)
    of_format_1(path)
    found = read(folder)
    assert found.sound
    assert [(each.files, each.other_format) for each in found.fingerprints if each.fingerprint == KEY] == [(1, 1)]


def test_the_rows_of_a_manifest(tmp_path: Path) -> None:
    folder, path, _ = store_of_two(tmp_path)
    rows = {row: [path.name, place] for place, row in enumerate(IDS)}
    found = read(folder, manifest(tmp_path, rows))
    assert (found.sound, found.manifest_rows, found.missing) == (True, 3, [])


@pytest.mark.parametrize("place", [["gone.safetensors", 0], 1, 3, -1], ids=["file", "other-row", "beyond", "before"])
def test_rows_of_a_manifest_that_no_file_holds(tmp_path: Path, place: Any) -> None:
    folder, path, _ = store_of_two(tmp_path)
    rows = {IDS[0]: place if isinstance(place, list) else [path.name, place], IDS[1]: [path.name, 1]}
    found = read(folder, manifest(tmp_path, rows))
    assert (found.sound, found.missing) == (False, [IDS[0]])


def test_rows_of_a_manifest_in_a_damaged_file(tmp_path: Path) -> None:
    folder, path, other = store_of_two(tmp_path)
    flipped_data(path)
    rows = {IDS[0]: [path.name, 0], store.row_id([11, 12]): [other.name, 0]}
    assert read(folder, manifest(tmp_path, rows)).missing == [IDS[0]]


def test_a_manifest_of_another_store(tmp_path: Path) -> None:
    folder, path, _ = store_of_two(tmp_path)
    rows = {IDS[0]: [path.name, 0]}
    assert read(folder, manifest(tmp_path, rows, fingerprint="0" * 16)).missing == [IDS[0]]


def test_rows_that_were_cut_have_other_ids_in_the_store(tmp_path: Path) -> None:
    folder, path, _ = store_of_two(tmp_path)
    rows = {store.row_id([*ROWS[1], 99]): [path.name, 1]}
    assert not read(folder, manifest(tmp_path, rows)).sound
    assert read(folder, manifest(tmp_path, rows, supervised_only=True)).sound


@pytest.mark.parametrize("name", ["nothing-here", "."])
def test_a_folder_that_is_no_store(tmp_path: Path, name: str) -> None:
    (tmp_path / "results").mkdir()
    with pytest.raises(
        DraftsmithError, match=r"(no such folder|is no store, as no folder in it .*); name that of extract\.store$"
    ):
        read(tmp_path / name)
