"""Folders of processes: whose they are, and which of them go."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from draftsmith import dry_run
from draftsmith.extract_shard.staging import staging
from draftsmith.processes import owned_folders
from draftsmith.processes.owned_folders import folder_name, owner, sweep
from draftsmith.store import leftovers

HOST = socket.gethostname()
SHARD = r"\d+-of-\d+"


def gone() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def made(root: Path, name: str) -> Path:
    (root / name).mkdir(parents=True)
    (root / name / "part.tmp").touch()
    return root / name


def test_a_folder_says_whose_it_is(tmp_path: Path) -> None:
    found = owner(tmp_path / folder_name("1-of-2"), SHARD)
    assert found is not None
    assert (found.host, found.pid) == (HOST, os.getpid())
    assert owner(tmp_path / "notes", SHARD) is None
    assert owner(tmp_path / folder_name(".dry-run"), SHARD) is None


def test_only_those_go_whose_owner_is_known_to_be_gone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    dead = made(tmp_path, f"1-of-2-{HOST}-{(pid := gone())}")
    stay = [
        made(tmp_path, name)
        for name in (f"1-of-2-{HOST}-{os.getppid()}", f"2-of-2-another-{gone()}", "notes", f".dry-run-{HOST}-{gone()}")
    ]
    (tmp_path / f"3-of-3-{HOST}-{gone()}").symlink_to(stay[2])
    assert [found.pid for found in sweep(tmp_path, SHARD)][1:] == [int(stay[1].name.rpartition("-")[2])]
    assert not dead.exists()
    assert all((path / "part.tmp").exists() for path in stay)
    assert f"removing {dead}, left by process {pid} that is gone" in capfd.readouterr().err
    assert sweep(tmp_path / "none", SHARD) == []


def test_a_number_that_passed_to_a_later_process_is_nobodys(tmp_path: Path) -> None:
    """The folder was last written to long before the process began that has its number now; clocks may differ by minutes."""
    path = made(tmp_path, f"1-of-2-{HOST}-{os.getppid()}")
    for hours, expected in ((0.1, False), (24 * 365, True)):
        os.utime(path, (then := psutil_start() - 3600 * hours, then))
        found = owner(path, SHARD)
        assert found is not None
        assert found.gone is expected, hours


def psutil_start() -> float:
    return owned_folders.psutil.Process(os.getppid()).create_time()


def test_another_users_folder_stays(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to give a folder away")
    path = made(tmp_path, f"1-of-2-{HOST}-{gone()}")
    os.chown(path, 65534, 65534)
    assert len(sweep(tmp_path, SHARD)) == 1
    assert path.exists()


def test_one_of_this_processs_own_number_goes_only_before_it_has_made_one(tmp_path: Path) -> None:
    """In a container each run may be process 7."""
    path = made(tmp_path, folder_name("1-of-2"))
    assert len(sweep(tmp_path, SHARD)) == 1
    assert sweep(tmp_path, SHARD, own=True) == []
    assert not path.exists()


def test_extraction_dry_run_and_store_agree(tmp_path: Path) -> None:
    """One function says for all three which folders are of processes that are gone."""
    dead, alive = f"1-of-1-{HOST}-{gone()}", f"1-of-1-{HOST}-{os.getppid()}"
    for name in (dead, alive):
        made(tmp_path / ".staging", name)
    notes = {item.path.name: (item.removable, item.note) for item in leftovers.staging(tmp_path)}
    assert notes[dead] == (True, f"of process {dead.rpartition('-')[2]}, which is gone")
    assert notes[alive] == (False, f"of process {os.getppid()}, which is alive")
    with staging(tmp_path, "1-of-1") as mine:
        assert {path.name for path in (tmp_path / ".staging").iterdir()} == {alive, mine.name}
    made(tmp_path, f".dry-run-{HOST}-{gone()}")
    with dry_run._folder(tmp_path) as trial:
        assert [path.name for path in tmp_path.glob(".dry-run-*")] == [trial.name]
