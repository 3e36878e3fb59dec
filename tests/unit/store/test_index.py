"""What a folder holds: found by its heads in no time, and trusted only once it was read."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from batches import DAMAGE, IDS, KEY, ROWS, flip, flipped_data, of_format_1, reader, states, write_batch, zeroed_data

from draftsmith import store
from draftsmith.extract_shard import plan
from draftsmith.extract_shard.plan import PlannedRow
from draftsmith.store import Journal, StoreError, index, verification

PLACES = {row: place for place, row in enumerate(IDS)}
PLANNED = [PlannedRow(row, len(tokens)) for row, tokens in zip(IDS, ROWS, strict=True)]


def test_scan_finds_every_row(tmp_path: Path) -> None:
    path = write_batch(tmp_path)
    found = store.scan(tmp_path, KEY)
    assert found.rows == {row: (path.name, place) for row, place in PLACES.items()}
    assert found.tokens == {IDS[0]: 1, IDS[1]: 4, IDS[2]: 2}
    assert found.bad == {}


def test_a_folder_that_is_not_there_yet_is_empty(tmp_path: Path) -> None:
    assert store.scan(tmp_path / KEY, KEY) == store.trusted(tmp_path / KEY, KEY, IDS) == store.StoreIndex({}, {}, {})


def test_half_written_files_are_not_looked_at(tmp_path: Path) -> None:
    write_batch(tmp_path).rename(tmp_path / ".batch.safetensors.tmp")
    assert store.scan(tmp_path, KEY).rows == {}


SEEN_BY_THE_HEAD = [damage for damage in DAMAGE if damage not in (flipped_data, zeroed_data)]


@pytest.mark.parametrize("damage", SEEN_BY_THE_HEAD, ids=lambda damage: damage.__name__)
def test_scan_passes_over_what_its_head_gives_away(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = write_batch(tmp_path)
    damage(path)
    found = store.scan(tmp_path, KEY)
    assert found.rows == {}
    assert list(found.bad) == [path.name]
    assert str(path) in found.bad[path.name]
    assert "its rows are computed again" in found.bad[path.name]
    assert path.exists()


@pytest.mark.parametrize("left", [0, 4, 8, 100, 1000, -1])
def test_a_file_cut_short_anywhere_is_passed_over(tmp_path: Path, left: int) -> None:
    path = write_batch(tmp_path)
    path.write_bytes(path.read_bytes()[:left])
    assert store.scan(tmp_path, KEY).rows == {}


# ---- trusted ----


@pytest.mark.parametrize("storage", ["plain", "fp8"])
@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_the_rows_of_a_damaged_or_foreign_file_are_computed_again_and_no_others(
    tmp_path: Path, damage: Callable[[Path], None], storage: store.Storage, capfd: pytest.CaptureFixture[str]
) -> None:
    path, other = write_batch(tmp_path, storage=storage), write_batch(tmp_path, [[11, 12]], storage=storage)
    damage(path)
    content = path.read_bytes()
    wanted = [*PLANNED, PlannedRow(store.row_id([11, 12]), 2)]
    found = store.trusted(tmp_path, KEY, [row.row_id for row in wanted])
    assert plan.missing(wanted, found.rows) == PLANNED
    assert found.rows == {store.row_id([11, 12]): (other.name, 0)}
    aside = tmp_path / ".damaged" / path.name
    assert list(found.bad) == [path.name]
    assert found.bad[path.name].startswith(str(path))
    assert found.bad[path.name].endswith(f"it is moved to {aside} and its rows are computed again")
    assert found.bad[path.name] in capfd.readouterr().err
    # Nothing is deleted, and it is never read again.
    assert not path.exists()
    assert aside.read_bytes() == content
    assert found.bad[path.name].startswith(aside.with_suffix(".txt").read_text().strip().split(" ", 2)[2])
    again = store.trusted(tmp_path, KEY, [row.row_id for row in wanted])
    assert (again.rows, again.bad) == (found.rows, {})


def test_a_second_damaged_file_of_a_name_does_not_replace_the_first(tmp_path: Path) -> None:
    for _ in range(3):
        flipped_data(write_batch(tmp_path))
        assert store.trusted(tmp_path, KEY, IDS).rows == {}
    assert len(list((tmp_path / ".damaged").glob("*.safetensors"))) == 3


def test_another_copy_of_a_row_stands_in(tmp_path: Path) -> None:
    first, second = sorted([write_batch(tmp_path), write_batch(tmp_path, [ROWS[1]])])
    flipped_data(first)
    found = store.trusted(tmp_path, KEY, IDS)
    assert found.rows[IDS[1]][0] == second.name


def test_a_file_of_another_format_is_foreign_here(tmp_path: Path) -> None:
    """The format is part of the fingerprint, so no such file can have been written here."""
    path = write_batch(tmp_path)
    of_format_1(path)
    assert "has format 1" in store.trusted(tmp_path, KEY, []).bad[path.name]
    assert (tmp_path / ".damaged" / path.name).exists()


def test_a_file_that_may_not_be_read_ends_the_run_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's file is not this run's to move."""
    path = write_batch(tmp_path)

    def refuse(path: Path) -> None:
        raise StoreError(f"{path}: may not be read")

    monkeypatch.setattr(verification, "open_file", refuse)
    with pytest.raises(StoreError, match="may not be read"):
        store.trusted(tmp_path, KEY, IDS)
    assert path.exists()


# ---- the journal ----


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were read as a whole, as they are."""
    names: list[str] = []
    compare = verification._compare

    def counted(file: object, path: Path, *rest: object) -> None:
        names.append(path.name)
        compare(file, path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(verification, "_compare", counted)
    return names


def test_what_was_published_is_not_read_again(tmp_path: Path, readings: list[str]) -> None:
    path = write_batch(tmp_path)
    Journal(tmp_path).add(path)
    assert store.trusted(tmp_path, KEY, IDS).rows == {row: (path.name, place) for row, place in PLACES.items()}
    assert readings == []


def test_what_was_verified_is_not_read_again(tmp_path: Path, readings: list[str]) -> None:
    path = write_batch(tmp_path)
    first = store.trusted(tmp_path, KEY, IDS)
    assert readings == [path.name]
    assert store.trusted(tmp_path, KEY, IDS) == first
    assert readings == [path.name]


def test_only_files_with_wanted_rows_are_read(tmp_path: Path, readings: list[str]) -> None:
    """A shard does not verify what the others answer for; what is not verified is not in the index either."""
    path, other = write_batch(tmp_path), write_batch(tmp_path, [[11, 12]])
    found = store.trusted(tmp_path, KEY, [IDS[1]])
    assert readings == [path.name]
    assert set(found.rows) == set(IDS)
    assert set(store.trusted(tmp_path, KEY, [store.row_id([11, 12])]).rows) == {*IDS, store.row_id([11, 12])}
    assert readings == [path.name, other.name]


def test_a_file_that_was_touched_is_read_again(tmp_path: Path, readings: list[str]) -> None:
    path = write_batch(tmp_path)
    Journal(tmp_path).add(path)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    assert set(store.trusted(tmp_path, KEY, IDS).rows) == set(IDS)
    assert readings == [path.name]


def test_damage_after_publication_is_found_by_its_time(tmp_path: Path) -> None:
    path = write_batch(tmp_path)
    Journal(tmp_path).add(path)
    time.sleep(0.02)
    flipped_data(path)
    assert store.trusted(tmp_path, KEY, IDS).rows == {}


def test_damage_that_leaves_no_trace_in_the_times_is_found_by_training(tmp_path: Path) -> None:
    """The journal vouches for the file until a reader has met the damage; then its rows are missing."""
    path = write_batch(tmp_path)
    flipped_data(path)
    # A disk that loses a bit later changes no time either.
    Journal(tmp_path).add(path)
    assert set(store.trusted(tmp_path, KEY, IDS).rows) == set(IDS)
    with pytest.raises(StoreError, match="--forcerun extract_shard"):
        reader(path, key=KEY).row(IDS[2])
    assert store.trusted(tmp_path, KEY, IDS).rows == {}


@pytest.mark.parametrize("command", [["cp", "-a"], ["rsync", "-a"]], ids=lambda command: command[0])
def test_a_copy_of_the_store_is_read_once(tmp_path: Path, readings: list[str], command: list[str]) -> None:
    """It keeps names, times and the journal, and may not be what was verified."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    path = write_batch(tmp_path / "old")
    Journal(tmp_path / "old").add(path)
    subprocess.run([*command, f"{tmp_path}/old/.", f"{tmp_path}/new/"], check=True)
    copy = tmp_path / "new" / path.name
    assert copy.stat().st_mtime_ns == path.stat().st_mtime_ns
    for _ in range(2):
        assert set(store.trusted(tmp_path / "new", KEY, IDS).rows) == set(IDS)
        assert readings == [path.name]


def test_a_store_that_is_moved_on_its_disk_is_not_read_again(tmp_path: Path, readings: list[str]) -> None:
    path = write_batch(tmp_path / "old")
    Journal(tmp_path / "old").add(path)
    (tmp_path / "old").rename(tmp_path / "new")
    assert set(store.trusted(tmp_path / "new", KEY, IDS).rows) == set(IDS)
    assert readings == []


def test_a_line_of_an_older_version_vouches_for_nothing(tmp_path: Path, readings: list[str]) -> None:
    path = write_batch(tmp_path)
    (tmp_path / ".verified").mkdir()
    known = {"name": path.name, "size": path.stat().st_size, "mtime_ns": path.stat().st_mtime_ns}
    (tmp_path / ".verified" / "host-1.jsonl").write_text(json.dumps(known) + "\n")
    assert set(store.trusted(tmp_path, KEY, IDS).rows) == set(IDS)
    assert readings == [path.name]


def test_a_journal_of_another_user_that_may_not_be_read_only_costs_time(
    tmp_path: Path, readings: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_batch(tmp_path)
    Journal(tmp_path).add(path)
    (theirs,) = (tmp_path / ".verified").iterdir()
    theirs.rename(tmp_path / ".verified" / "host-of-another-1.jsonl")
    read = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.name == "host-of-another-1.jsonl":
            raise PermissionError(13, "Permission denied")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    for _ in range(2):
        assert set(store.trusted(tmp_path, KEY, IDS).rows) == set(IDS)
    assert readings == [path.name]
    assert "host-of-another-1.jsonl: cannot be read (Permission denied)" in capfd.readouterr().err


def test_half_a_line_of_a_killed_process_is_no_line(tmp_path: Path, readings: list[str]) -> None:
    path, other = write_batch(tmp_path), write_batch(tmp_path, [[11, 12]])
    Journal(tmp_path).add(path)
    (lines,) = (tmp_path / ".verified").glob("*.jsonl")
    whole = lines.read_text()
    lines.write_text(whole + whole[: len(whole) // 2])
    Journal(tmp_path).add(other)
    assert {name for name, _ in Journal(tmp_path).read()} == {path.name, other.name}
    assert store.trusted(tmp_path, KEY, IDS).bad == {}
    assert readings == []


def _add(folder: Path, count: int, number: int) -> None:
    journal = Journal(folder)
    for place in range(count):
        (folder / f"{number}-{place}").touch()
        journal.add(folder / f"{number}-{place}")


def test_every_process_writes_a_journal_of_its_own(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_add, args=(tmp_path, 50, number)) for number in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert len(list((tmp_path / ".verified").iterdir())) == 4
    assert {name for name, _ in Journal(tmp_path).read()} == {f"{n}-{place}" for n in range(4) for place in range(50)}


def test_a_journal_that_cannot_be_written_only_costs_time(
    tmp_path: Path, readings: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_batch(tmp_path)
    (tmp_path / ".verified").write_text("no folder")
    for _ in range(2):
        assert set(store.trusted(tmp_path, KEY, IDS).rows) == set(IDS)
    assert readings == [path.name, path.name]
    assert "files are verified anew by the next run" in capfd.readouterr().err


def test_long_verification_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for number in range(3):
        write_batch(tmp_path, [[number]])
    monkeypatch.setattr(verification, "_LOG_SECONDS", 0.0)
    store.trusted(tmp_path, KEY, [store.row_id([number]) for number in range(3)])
    lines = capfd.readouterr().err.splitlines()
    assert [line.split("store: ")[1].split(",")[0] for line in lines] == [
        f"verified {number} of 3 files" for number in (1, 2, 3)
    ]


# ---- several runs at once ----


def test_a_file_that_goes_while_it_is_looked_at_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another shard has just moved it aside."""
    path = write_batch(tmp_path)
    heads = list(index.heads(tmp_path, KEY))
    path.unlink()
    monkeypatch.setattr(index, "heads", lambda *_: heads)
    assert store.trusted(tmp_path, KEY, IDS) == store.StoreIndex({}, {}, {})


def test_a_good_file_that_has_taken_the_name_is_not_moved(tmp_path: Path) -> None:
    """This run read the damaged file, the other one moved it and published the rows anew."""
    path = write_batch(tmp_path)
    flip(path, path.stat().st_size - 1)
    verdict = verification.examine(path, KEY)
    assert verdict is not None
    assert verdict.error is not None
    time.sleep(0.02)
    write_batch(tmp_path)
    assert verification.move_aside(path, "damaged", verdict.seen) is None
    assert set(store.trusted(tmp_path, KEY, IDS).rows) == set(IDS)


def _shard(folder: Path, scatteritem: str, rows: list[list[int]], damaging: bool) -> None:
    """What a shard does again and again, with states that follow from the rows."""
    torch.set_num_threads(1)
    tokens = {store.row_id(row): row for row in rows}
    mine = plan.share([PlannedRow(row, len(ids)) for row, ids in tokens.items()], scatteritem, 16)
    journal = Journal(folder)
    for _ in range(4):
        todo = plan.missing(mine, store.trusted(folder, KEY, [row.row_id for row in mine]).rows)
        for number, batch in enumerate(plan.pack(todo, 16)):
            # Another version of vLLM makes another head of another length.
            with _between(folder, damaging):
                path = write_batch(folder, [tokens[row.row_id] for row in batch], vllm=scatteritem * len(scatteritem))
                journal.add(path)
            if damaging and number % 3 == 0:
                # File systems count time in steps of some milliseconds.
                time.sleep(0.02)
                with _between(folder, damaging), suppress(FileNotFoundError):
                    flip(path, path.stat().st_size - 1)


@contextmanager
def _between(folder: Path, damaging: bool) -> Iterator[None]:
    """No damage between a file's taking its name and its line in the journal, which says that this process wrote all of it."""
    with open(folder.parent / "lock", "w") as lock:
        if damaging:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.mark.parametrize("damaging", [False, True])
def test_runs_with_different_numbers_of_shards_at_once(tmp_path: Path, damaging: bool) -> None:
    """Seven shards of three runs write in one folder, and damage it; each row is there in the end, and is right."""
    rows = [[number, *range(number % 7)] for number in range(60)]
    context = multiprocessing.get_context("fork")
    items = ["1-of-1", "1-of-2", "2-of-2", "1-of-4", "2-of-4", "3-of-4", "4-of-4"]
    processes = [context.Process(target=_shard, args=(tmp_path, item, rows, damaging)) for item in items]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * len(items)
    assert (tmp_path / ".damaged").exists() == damaging
    _shard(tmp_path, "1-of-1", rows, damaging=False)
    wanted = [store.row_id(row) for row in rows]
    found = store.trusted(tmp_path, KEY, wanted)
    assert set(wanted) <= set(found.rows)
    opened = store.StoreReader(tmp_path, dict(found.rows), KEY)
    for row in rows:
        stored = opened.row(store.row_id(row))
        assert stored.token_ids.tolist() == row
        assert torch.equal(stored.aux, states([row], torch.float32)[0])
