"""The cache of what conversations were made into: parts that are sound or as if they were not there."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from draftsmith.tokenize import row_cache
from draftsmith.tokenize.packed_rows import Packed
from draftsmith.tokenize.row_cache import RowCache


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def packed(number: int) -> Packed:
    return Packed(f'{{"number":{number}}}', bytes([number % 256]) * 4 * number)


def fill(folder: Path, *numbers: int) -> None:
    with RowCache(folder) as cache:
        for number in numbers:
            cache.add(key(number), packed(number))


def found(folder: Path, *numbers: int) -> list[int]:
    """Those of ``numbers`` that the cache has, each with what was put in."""
    cache = RowCache(folder)
    have = [number for number in numbers if cache.get(key(number)) is not None]
    assert all(cache.get(key(number)) == packed(number) for number in have)
    assert len(cache) == len(have)
    return have


def test_what_was_added_is_there_for_the_next_run(tmp_path: Path) -> None:
    assert found(tmp_path / "new", 1) == []
    fill(tmp_path, 1, 2, 0)
    fill(tmp_path, 7)
    assert found(tmp_path, 0, 1, 2, 3, 7) == [0, 1, 2, 7]


def test_nothing_new_writes_nothing(tmp_path: Path) -> None:
    fill(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_keeps_what_it_made(tmp_path: Path) -> None:
    def fail() -> None:
        with RowCache(tmp_path) as cache:
            cache.add(key(1), packed(1))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert found(tmp_path, 1) == [1]


def test_a_killed_run_loses_the_part_that_it_was_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A part of two of these, which have some 20 bytes of text and 400 of ids each.
    monkeypatch.setattr(row_cache, "_PART_BYTES", 800)
    child = os.fork()
    if not child:
        cache = RowCache(tmp_path)
        for number in range(100, 105):
            cache.add(key(number), packed(number))
        os._exit(0)
    os.waitpid(child, 0)
    assert found(tmp_path, *range(100, 105)) == [100, 101, 102, 103]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("how", ["flipped", "cut", "empty"])
def test_a_damaged_part_is_left_out_and_named(tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, 1, 2)
    [part] = tmp_path.iterdir()
    fill(tmp_path, 3)
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes({"flipped": bytes(content), "cut": content[:-1], "empty": b""}[how])
    assert found(tmp_path, 1, 2, 3) == [3]
    assert f"{part}: is damaged and left out; its conversations are made again" in capsys.readouterr().err
    assert not part.exists()
    fill(tmp_path, 1, 2)
    assert found(tmp_path, 1, 2, 3) == [1, 2, 3]
    assert "damaged" not in capsys.readouterr().err


def test_two_runs_at_once(tmp_path: Path) -> None:
    with RowCache(tmp_path) as one, RowCache(tmp_path) as other:
        for number in (1, 2):
            one.add(key(number), packed(number))
        for number in (2, 3):
            other.add(key(number), packed(number))
    assert found(tmp_path, 1, 2, 3) == [1, 2, 3]


def test_the_same_part_of_two_runs_is_one_file(tmp_path: Path) -> None:
    with RowCache(tmp_path) as one, RowCache(tmp_path) as other:
        for cache in (one, other):
            cache.add(key(5), packed(5))
    assert len(list(tmp_path.iterdir())) == 1


def test_a_part_that_another_run_removes_is_missed_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_cache, "_OPEN_PARTS", 1)
    fill(tmp_path, 1)
    fill(tmp_path, 2)
    cache = RowCache(tmp_path)
    for part in tmp_path.iterdir():
        part.unlink()
    # One part is open still, the other was closed to make room for it.
    assert sorted(number for number in (1, 2) if cache.get(key(number)) is None) in ([1], [2])


def test_unfinished_files_of_killed_runs_are_swept_away(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    old, young = tmp_path / ".a.arrow.1.tmp", tmp_path / ".b.arrow.2.tmp"
    for path in (old, young):
        path.write_bytes(b"half")
    then = time.time() - 2 * row_cache._STALE_SECONDS
    os.utime(old, (then, then))
    assert found(tmp_path, 1) == [1]
    assert not old.exists()
    assert young.exists()


def test_more_parts_than_are_open_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_cache, "_OPEN_PARTS", 2)
    for number in range(6):
        fill(tmp_path, number, number + 10)
    cache = RowCache(tmp_path)
    for number in (0, 15, 3, 11, 5, 0, 14):
        assert cache.get(key(number)) == packed(number)
        assert len(cache._open) <= 2


def test_work_of_some_seconds_is_kept_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(row_cache.time, "monotonic", lambda: clock[0])
    cache = RowCache(tmp_path)
    cache.add(key(1), packed(1))
    clock[0] += 19.0
    cache.add(key(2), packed(2))
    assert found(tmp_path, 1, 2) == []
    clock[0] += 2.0
    cache.add(key(3), packed(3))
    # As a kill -9 would find it.
    assert found(tmp_path, 1, 2, 3) == [1, 2, 3]
