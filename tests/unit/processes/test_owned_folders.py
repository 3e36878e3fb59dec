"""Folders of processes: whose they are, and which of them go."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path

import pytest

from draftsmith import dry_run
from draftsmith.extract_shard.staging import staging
from draftsmith.processes import owned_folders
from draftsmith.processes.owned_folders import folder_name, owner, sweep
from draftsmith.processes.run_mark import here
from draftsmith.store import leftovers

HOST = socket.gethostname()
HERE = f"{HOST}@{here()}"
CONTAINER = "0123abcd"
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
    assert (found.host, found.place, found.pid) == (HOST, here(), os.getpid())
    assert found.mine
    assert owner(tmp_path / "notes", SHARD) is None
    assert owner(tmp_path / folder_name(".dry-run"), SHARD) is None


def test_only_those_go_whose_owner_is_known_to_be_gone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    dead = made(tmp_path, f"1-of-2-{HERE}-{(pid := gone())}")
    stay = [
        made(tmp_path, name)
        for name in (f"1-of-2-{HERE}-{os.getppid()}", f"2-of-2-another-{gone()}", "notes", f".dry-run-{HERE}-{gone()}")
    ]
    (tmp_path / f"3-of-3-{HERE}-{gone()}").symlink_to(stay[2])
    assert [found.pid for found in sweep(tmp_path, SHARD)][1:] == [int(stay[1].name.rpartition("-")[2])]
    assert not dead.exists()
    assert all((path / "part.tmp").exists() for path in stay)
    assert f"removing {dead}, left by process {pid} that is gone" in capfd.readouterr().err
    assert sweep(tmp_path / "none", SHARD) == []


def test_a_number_that_passed_to_a_later_process_is_nobodys(tmp_path: Path) -> None:
    """The folder was last written to long before the process began that has its number now; clocks may differ by minutes."""
    path = made(tmp_path, f"1-of-2-{HERE}-{os.getppid()}")
    for hours, expected in ((0.1, False), (24 * 365, True)):
        os.utime(path, (then := psutil_start() - 3600 * hours, then))
        found = owner(path, SHARD)
        assert found is not None
        assert found.gone is expected, hours


@pytest.mark.parametrize("name", [f"{HOST}@{CONTAINER}", HOST], ids=["another-container", "older-version"])
def test_a_number_of_another_place_tells_nothing(tmp_path: Path, name: str) -> None:
    """Containers with the host's network have its name, and in each a living process may have a number that is free here."""
    path = made(tmp_path, f"1-of-2-{name}-{gone()}")
    own = made(tmp_path, f"2-of-2-{name}-{os.getpid()}")
    assert [found.gone for found in sweep(tmp_path, SHARD, own=True)] == [False, False]
    assert "may be alive: look from there" in str(owner(path, SHARD))
    assert path.exists()
    assert own.exists()


@pytest.mark.parametrize("name", [f"{HOST}@{CONTAINER}", HOST], ids=["another-container", "older-version"])
@pytest.mark.parametrize(
    ("booted", "hours", "expected"),
    [(100.0, 47.0, False), (100.0, 49.0, True), (2.0, 1.9, False), (2.0, 2.1, False), (2.0, 2.3, True)],
)
def test_what_was_left_before_the_boot_or_days_ago_is_nobodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, booted: float, hours: float, expected: bool
) -> None:
    """The host began to run ``booted`` hours ago, the folder has not changed for ``hours``; clocks may differ by ten minutes."""
    monkeypatch.setattr(owned_folders.psutil, "boot_time", lambda: time.time() - 3600 * booted)
    path = made(tmp_path, f"1-of-2-{name}-{os.getppid()}")
    os.utime(path, (then := time.time() - 3600 * hours, then))
    found = owner(path, SHARD)
    assert found is not None
    assert found.gone is expected
    sweep(tmp_path, SHARD)
    assert path.exists() is not expected


def test_a_host_with_hyphens_and_digits(tmp_path: Path) -> None:
    found = owner(tmp_path / "12-of-16-node-7-0123abcd@89abcdef-42", SHARD)
    assert found is not None
    assert (found.host, found.place, found.pid) == ("node-7-0123abcd", "89abcdef", 42)
    old = owner(tmp_path / "12-of-16-node-7-0123abcd-42", SHARD)
    assert old is not None
    assert (old.host, old.place, old.pid) == ("node-7-0123abcd", None, 42)


def psutil_start() -> float:
    return owned_folders.psutil.Process(os.getppid()).create_time()


def test_another_users_folder_stays(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to give a folder away")
    path = made(tmp_path, f"1-of-2-{HERE}-{gone()}")
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
    dead, alive = f"1-of-1-{HERE}-{gone()}", f"1-of-1-{HERE}-{os.getppid()}"
    for name in (dead, alive):
        made(tmp_path / ".staging", name)
    notes = {item.path.name: (item.removable, item.note) for item in leftovers.staging(tmp_path)}
    assert notes[dead] == (True, f"of process {dead.rpartition('-')[2]}, which is gone")
    assert notes[alive] == (False, f"of process {os.getppid()}, which is alive")
    with staging(tmp_path, "1-of-1") as mine:
        assert {path.name for path in (tmp_path / ".staging").iterdir()} == {alive, mine.name}
    made(tmp_path, f".dry-run-{HERE}-{gone()}")
    with dry_run._folder(tmp_path) as trial:
        assert [path.name for path in tmp_path.glob(".dry-run-*")] == [trial.name]
