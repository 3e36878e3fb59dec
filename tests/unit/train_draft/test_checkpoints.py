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


@pytest.mark.parametrize(
    ("mark", "why"),
    [
        ('"notes": {"fingerprint": "abc"}', "it is of another training (abc)"),
        ('"notes": {"step": 10}', "it is of step 10"),
        ('"else": {}', "complete.json has no notes"),
    ],
)
def test_another_trainings_is_told_passed_over_and_left_alone(folder: Path, mark: str, why: str) -> None:
    alien = folder / "checkpoint-100"
    marked = (alien / "complete.json").read_text()
    assert checkpoints.fault(alien) is None
    listed = marked.split('"notes"')[0]
    (alien / "complete.json").write_text(f"{listed}{mark}}}")
    assert checkpoints.newest(folder) == folder / "checkpoint-10"
    assert checkpoints.remove_broken(folder) == [f"{alien}: {why}; it is passed over and left alone"]
    # It neither counts among those that are kept nor goes with the others.
    checkpoints.keep_newest(folder, 1)
    assert [path.name for path in checkpoints.checkpoints(folder)] == ["checkpoint-10", "checkpoint-100"]
    # The same step of this training takes its name, not its place.
    staged = folder / checkpoints.STAGING / "checkpoint-100"
    staged.mkdir(parents=True)
    checkpoints.publish(staged, folder, {"fingerprint": folder.name, "step": 100})
    assert checkpoints.newest(folder) == alien
    (aside,) = folder.glob("checkpoint-100-of-another-training-*")
    assert (aside / "model.safetensors").read_bytes() == b"weights"


def test_those_beyond_the_last_step_neither_count_nor_go(folder: Path) -> None:
    checkpoints.keep_newest(folder, 1, last=10)
    assert [path.name for path in checkpoints.checkpoints(folder)] == ["checkpoint-10", "checkpoint-100"]


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
