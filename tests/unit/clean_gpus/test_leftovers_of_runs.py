"""Shared memory and socket folders of runs that are gone: only what is theirs, this user's and used by nobody goes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path

import pytest
from cast_of_processes import Cast

from draftsmith.clean_gpus import leftovers
from draftsmith.processes import run_mark
from draftsmith.processes.runtime_folder import VARIABLE, runtime_folder
from draftsmith.processes.scratch import scratch
from fake_nvml import Nvml

GONE = f"999999-1-{run_mark.here()}"
ELSEWHERE = "999999-1-01234567"
# What an engine's worker does: it makes a segment, then waits; nobody unlinks it when it is killed.
SEGMENT = """
import sys, time
from multiprocessing import resource_tracker, shared_memory
made = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(made._name, "shared_memory")
open({note!r}, "w").write(made.name)
print("up", flush=True)
time.sleep(600)
"""


@pytest.fixture
def segment() -> Iterator[Path]:
    """A file in /dev/shm as Python makes it, not mapped by this process."""
    made = shared_memory.SharedMemory(create=True, size=4096)
    made.close()
    yield Path("/dev/shm") / made.name
    try:
        made.unlink()
    except FileNotFoundError:
        # A test that removed it: the tracker would complain.
        shared_memory.resource_tracker.unregister(made._name, "shared_memory")  # type: ignore[attr-defined]


def listed(mark: str, path: Path, inode: int | None = None) -> Path:
    """The list that a run made of its shared memory."""
    made = runtime_folder("runs") / f"{mark}.json"
    made.write_text(json.dumps({"files": [[str(path), path.stat().st_ino if inode is None else inode]]}))
    return made


def test_shared_memory_of_a_run_that_is_gone_goes_once(nvml: Nvml, segment: Path) -> None:
    made = listed(GONE, segment)
    assert leftovers.sweep() == [str(segment)]
    assert not segment.exists()
    assert not made.exists()
    assert leftovers.sweep() == []


def test_a_file_of_that_name_which_another_made_since_stays(nvml: Nvml, segment: Path) -> None:
    made = listed(GONE, segment, inode=segment.stat().st_ino + 1)
    assert leftovers.sweep() == []
    assert segment.exists()
    assert not made.exists()


def test_what_somebody_maps_stays(nvml: Nvml, segment: Path) -> None:
    listed(GONE, segment)
    user = shared_memory.SharedMemory(segment.name)
    assert leftovers.sweep() == []
    assert segment.exists()
    user.close()


def test_another_users_file_stays(nvml: Nvml, segment: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to give a file away")
    listed(GONE, segment)
    os.chown(segment, 65534, 65534)
    assert leftovers.sweep() == []
    assert segment.exists()


def test_a_list_cannot_name_a_file_elsewhere(nvml: Nvml, tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    for name in (tmp_path / "precious", Path("/dev/shm/..") / tmp_path.relative_to("/") / "precious"):
        made = runtime_folder("runs") / f"{GONE}.json"
        made.write_text(json.dumps({"files": [[str(name), (tmp_path / "precious").stat().st_ino]]}))
        assert leftovers.sweep() == []
    assert (tmp_path / "precious").exists()


def test_shared_memory_of_a_run_that_may_be_alive_stays(nvml: Nvml, cast: Cast, segment: Path) -> None:
    """Its first process lives; or lived on another host or in another container; or is gone while an orphan of it lives."""
    _, leader = cast.alive()
    marks = [str(run_mark.read(cast.pids[1]).stage), ELSEWHERE]
    assert marks[0].startswith(f"{leader}-")
    orphan = cast.orphan()
    marks.append(str(run_mark.read(orphan).stage))
    for mark in marks:
        made = listed(mark, segment)
        assert leftovers.sweep() == []
        assert segment.exists(), mark
        assert made.exists(), mark
        made.unlink()


def test_an_engine_that_was_killed_with_all_its_processes_leaves_nothing(
    nvml: Nvml, cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the list that a stage makes to the sweep of the next: here the engine is a child of this process."""
    note = tmp_path / "name"
    child = cast.child(SEGMENT.format(note=str(note)))
    leftovers.remember()
    (made,) = runtime_folder("runs").glob("*.json")
    segment = Path("/dev/shm") / note.read_text()
    assert json.loads(made.read_text()) == {"files": [[str(segment), segment.stat().st_ino]]}
    assert leftovers.sweep() == [], "the run lives"
    child.kill()
    child.wait()
    assert segment.exists()
    # As if this process had been killed as well.
    made.rename(made.with_stem(GONE))
    assert leftovers.sweep() == [str(segment)]
    assert not segment.exists()


def test_an_engine_that_ends_in_order_is_tidied_up_after(nvml: Nvml, cast: Cast, tmp_path: Path) -> None:
    """vLLM on CPUs leaves shared memory even then."""
    note = tmp_path / "name"
    child = cast.child(SEGMENT.format(note=str(note)))
    leftovers.remember()
    child.kill()
    child.wait()
    leftovers.forget()
    assert not (Path("/dev/shm") / note.read_text()).exists()
    assert not list(runtime_folder("runs").glob("*.json"))


def test_a_list_that_cannot_be_made_or_read_ends_no_run(
    nvml: Nvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for text in ("", "[]", '{"files": [1]}', '{"files": [["x", "y"]]}'):
        (runtime_folder("runs") / f"{GONE}.json").write_text(text)
        assert leftovers.sweep() == []
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file"))
    (tmp_path / "file").touch()
    leftovers.remember()
    leftovers.forget()
    assert leftovers.sweep() == []
    said = capfd.readouterr().err
    assert f"will not be removed: {tmp_path}/file: " in said
    assert f"is not looked at: {tmp_path}/file: " in said


def test_socket_folders(nvml: Nvml, cast: Cast, tmp_path: Path) -> None:
    orphan = str(run_mark.read(cast.orphan()).stage)
    names = {"gone": f"ds-{GONE}-abcd1234", "elsewhere": f"ds-{ELSEWHERE}-abcd1234", "orphan": f"ds-{orphan}-abcd1234"}
    names |= {"other": "ds-notes", "unmarked": "ds-abcd1234"}
    for name in names.values():
        (tmp_path / name).mkdir()
        (tmp_path / name / "socket").touch()
    (tmp_path / f"ds-{GONE}-link").symlink_to(tmp_path / names["other"])
    with scratch() as mine:
        assert str(run_mark.mark_run()) in mine.name
        assert leftovers.sweep() == [str(tmp_path / names.pop("gone"))]
        assert mine.is_dir()
    assert not mine.exists()
    assert all((tmp_path / name / "socket").exists() for name in names.values())


def test_a_sockets_path_is_short_enough_whatever_tmpdir_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nvml: Nvml
) -> None:
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with scratch() as folder:
        assert len(str(folder / "01234567-0123-0123-0123-0123456789ab")) <= 107
    monkeypatch.setattr("tempfile.tempdir", "/var/tmp")
    with scratch() as folder:
        assert folder.parent == Path("/var/tmp")
