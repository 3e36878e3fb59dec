"""Room on the disk: refused before the start, and watched while batches are written."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from draftsmith.errors import DraftsmithError
from draftsmith.extract_shard import space


def free(monkeypatch: pytest.MonkeyPatch, amount: int) -> None:
    real = shutil.disk_usage

    def usage(path: Any) -> Any:
        return real(path)._replace(free=amount)

    monkeypatch.setattr(space.shutil, "disk_usage", usage)


def test_states_that_do_not_fit_are_refused_with_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million tokens of Kimi-K2.5 in bfloat16: 57,344 bytes and an id of 4 each, 1 % for heads, and 64 MiB for the rest."""
    need = int(1_000_000 * 57_348 * 1.01) + (64 << 20)
    assert space.needed(1_000_000, 57_344) == need
    free(monkeypatch, need)
    space.check_space(tmp_path, 1_000_000, 57_344)
    free(monkeypatch, need - 1)
    with pytest.raises(DraftsmithError, match=r"1000000 tokens need 57\.99 GB and 57\.99 GB are free.*extract\.store"):
        space.check_space(tmp_path, 1_000_000, 57_344)


def test_it_is_time_to_stop_while_what_has_begun_still_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "_LOOK_SECONDS", 0.0)
    left = [1 << 30]
    room = space.Room(tmp_path, lambda: left[0])
    free(monkeypatch, (1 << 30) + (64 << 20))
    assert room.short() is None
    free(monkeypatch, (1 << 30) + (64 << 20) - 1)
    left[0] -= 1
    assert room.short() is None, "less is left to write"
    left[0] += 1
    assert room.short() == f"{tmp_path}: only 1.14 GB are free, and what is begun may need 1.14 GB"
    free(monkeypatch, 1 << 40)
    assert room.short(), "once said it stays said"


def test_files_that_go_while_they_are_counted_have_no_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer renames them from one name to the other, the publisher to another folder."""
    (tmp_path / "whole").write_bytes(b"12345")
    (tmp_path / "folder").mkdir()
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [*glob(self, pattern), self / "gone.tmp"])
    assert space.held(tmp_path) == 5


def test_a_full_disk_is_found_behind_other_errors(tmp_path: Path) -> None:
    cause = OSError(28, "No space left on device")
    error = RuntimeError("a batch could not be written")
    error.__cause__ = cause
    assert space.is_full(error, tmp_path)
    assert not space.is_full(RuntimeError("another"), tmp_path)
