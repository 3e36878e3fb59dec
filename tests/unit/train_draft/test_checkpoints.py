"""Complete or not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftsmith.train_draft import checkpoints


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Complete checkpoints of steps 5, 10 and 100."""
    for step in (5, 100, 10):
        checkpoint = tmp_path / f"checkpoint-{step}"
        checkpoint.mkdir()
        (checkpoint / "model.safetensors").write_bytes(b"weights")
        (checkpoint / "optimizer.pt").write_bytes(b"moments")
        checkpoints.finish(checkpoint, {"seconds": step})
    return tmp_path


def test_newest_is_by_step_with_its_notes(folder: Path) -> None:
    newest = checkpoints.newest(folder)
    assert newest == folder / "checkpoint-100"
    assert checkpoints.complete(newest) == {"seconds": 100}


@pytest.mark.parametrize("damage", ["no mark", "cut mark", "cut file", "lost file", "empty folder"])
def test_incomplete_is_passed_over_and_removed(folder: Path, damage: str) -> None:
    broken = folder / "checkpoint-100"
    if damage == "no mark":
        (broken / "complete.json").unlink()
    elif damage == "cut mark":
        (broken / "complete.json").write_text('{"files": {"mod')
    elif damage == "cut file":
        (broken / "optimizer.pt").write_bytes(b"mom")
    elif damage == "lost file":
        (broken / "model.safetensors").unlink()
    else:
        for path in broken.iterdir():
            path.unlink()
    assert checkpoints.newest(folder) == folder / "checkpoint-10"
    assert checkpoints.remove_incomplete(folder) == [broken]
    assert not broken.exists()


def test_only_old_checkpoints_are_deleted(folder: Path) -> None:
    others = [folder / "notes.txt", folder / "checkpoint-best"]
    others[0].write_text("mine")
    others[1].mkdir()
    checkpoints.keep_newest(folder, 2)
    assert [path.name for path in checkpoints.checkpoints(folder)] == ["checkpoint-10", "checkpoint-100"]
    checkpoints.remove_incomplete(folder)
    assert all(path.exists() for path in others)


def test_nothing_there(tmp_path: Path) -> None:
    assert checkpoints.newest(tmp_path) is None
    assert checkpoints.newest(tmp_path / "absent") is None
