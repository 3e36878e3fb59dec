"""Complete or not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftsmith.train_draft import checkpoints


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Complete checkpoints of steps 5, 10 and 100."""
    for step in (5, 100, 10):
        staged = tmp_path / checkpoints.STAGING / f"checkpoint-{step}"
        staged.mkdir(parents=True)
        (staged / "model.safetensors").write_bytes(b"weights")
        (staged / "optimizer.pt").write_bytes(b"moments")
        assert checkpoints.publish(staged, tmp_path, {"seconds": step}) == tmp_path / f"checkpoint-{step}"
    return tmp_path


def test_newest_is_by_step_with_its_notes(folder: Path) -> None:
    newest = checkpoints.newest(folder)
    assert newest == folder / "checkpoint-100"
    assert checkpoints.notes(newest) == {"seconds": 100}
    assert checkpoints.remove_broken(folder) == []


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        ("no mark", "complete.json is missing"),
        ("cut mark", "complete.json is missing or not readable"),
        ("old mark", "complete.json is not what this version writes"),
        ("cut file", "optimizer.pt has 3 bytes instead of 7"),
        ("other bytes", "optimizer.pt does not have its checksum"),
        ("lost file", "model.safetensors: No such file"),
        ("empty folder", "complete.json is missing"),
    ],
)
def test_damaged_is_passed_over_and_removed_with_one_line(folder: Path, damage: str, why: str) -> None:
    broken = folder / "checkpoint-100"
    if damage == "no mark":
        (broken / "complete.json").unlink()
    elif damage == "cut mark":
        (broken / "complete.json").write_text('{"files": {"mod')
    elif damage == "old mark":
        (broken / "complete.json").write_text('{"files": {"optimizer.pt": 7}, "notes": {}}')
    elif damage == "cut file":
        (broken / "optimizer.pt").write_bytes(b"mom")
    elif damage == "other bytes":
        (broken / "optimizer.pt").write_bytes(b"momentS")
    elif damage == "lost file":
        (broken / "model.safetensors").unlink()
    else:
        for path in broken.iterdir():
            path.unlink()
    assert checkpoints.newest(folder) == folder / "checkpoint-10"
    (line,) = checkpoints.remove_broken(folder)
    assert str(broken) in line
    assert why in line
    assert not broken.exists()
    assert checkpoints.newest(folder) == folder / "checkpoint-10"


def test_what_was_being_saved_is_no_checkpoint_and_goes(folder: Path) -> None:
    staged = folder / checkpoints.STAGING / "checkpoint-200"
    staged.mkdir()
    (staged / "model.safetensors").write_bytes(b"wei")
    assert checkpoints.newest(folder) == folder / "checkpoint-100"
    assert checkpoints.remove_broken(folder) == []
    assert not staged.exists()


def test_a_step_that_is_saved_again_replaces_the_old_one(folder: Path) -> None:
    staged = folder / checkpoints.STAGING / "checkpoint-10"
    staged.mkdir()
    (staged / "model.safetensors").write_bytes(b"other")
    checkpoints.publish(staged, folder, {"seconds": 1})
    assert sorted(path.name for path in (folder / "checkpoint-10").iterdir()) == ["complete.json", "model.safetensors"]
    assert checkpoints.fault(folder / "checkpoint-10") is None


def test_only_old_checkpoints_are_deleted(folder: Path) -> None:
    others = [folder / "notes.txt", folder / "checkpoint-best"]
    others[0].write_text("mine")
    others[1].mkdir()
    checkpoints.keep_newest(folder, 2)
    assert [path.name for path in checkpoints.checkpoints(folder)] == ["checkpoint-10", "checkpoint-100"]
    checkpoints.remove_broken(folder)
    assert all(path.exists() for path in others)


def test_nothing_there(tmp_path: Path) -> None:
    assert checkpoints.newest(tmp_path) is None
    assert checkpoints.newest(tmp_path / "absent") is None
