"""Files are complete or absent, whatever happens while they are written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith import files
from draftsmith.errors import DraftsmithError


def test_a_value_comes_back(tmp_path: Path) -> None:
    value = {"name": "Kimi-K2.5 déjà", "layers": [2, 30, 58], "share": 0.25, "none": None}
    files.write_json(tmp_path / "new/folder/value.json", value)
    assert files.read_json(tmp_path / "new/folder/value.json") == value
    assert os.listdir(tmp_path / "new/folder") == ["value.json"]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    files.write_json(path, 1)
    with pytest.raises(RuntimeError), files.atomic_path(path) as temporary:  # noqa: PT012
        temporary.write_text("half")
        raise RuntimeError
    assert files.read_json(path) == 1
    assert os.listdir(tmp_path) == ["value.json"]


def test_what_json_cannot_say_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nan"):
        files.write_json(tmp_path / "value.json", {"loss": float("nan")})
    assert os.listdir(tmp_path) == []


def test_a_killed_writer_leaves_no_file_of_that_name(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from draftsmith.files import atomic_path\n"
        "with atomic_path(Path(sys.argv[1])) as temporary:\n"
        "    temporary.write_text('half'); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "value.json"], cwd=Path(files.__file__).parents[1])
    assert done.returncode == -9
    assert not (tmp_path / "value.json").exists()


def test_two_writers_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    with files.atomic_path(path) as first, files.atomic_path(path) as second:
        assert first != second
        first.write_text("1")
        second.write_text("2")
    assert path.read_text() == "1"
    assert os.listdir(tmp_path) == ["value.json"]


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DraftsmithError) as error:
        files.read_json(tmp_path / "none.json")
    assert str(error.value) == f"{tmp_path}/none.json: no such file; the stage that makes it has not run"


def test_a_broken_file(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text('{"a": 1,')
    with pytest.raises(
        DraftsmithError, match=r"broken\.json: not valid JSON \(.*\); delete it and run its stage again"
    ):
        files.read_json(tmp_path / "broken.json")


def test_a_folder_that_can_be_written(tmp_path: Path) -> None:
    files.check_writable(tmp_path / "new/store", "extract.store")
    assert os.listdir(tmp_path / "new/store") == []


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DraftsmithError) as error:
        files.check_writable(tmp_path / "file/store", "extract.store")
    assert str(error.value) == (
        f"{tmp_path}/file/store: cannot be written (Not a directory); name another folder in the config key extract.store"
    )


def test_what_is_not_forced_to_the_disk_is_whole_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: pytest.fail("forced to the disk"))
    with files.atomic_path(tmp_path / "a", synced=False) as temporary:
        temporary.write_text("whole")
        assert not (tmp_path / "a").exists()
    assert (tmp_path / "a").read_text() == "whole"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[]", "holds no JSON object; delete it and run its stage again"),
        ("{}", "lacks layers, rows; delete it and run its stage again"),
        ('{"rows": null}', "lacks layers; delete it and run its stage again"),
    ],
)
def test_an_object_without_what_is_read_of_it(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DraftsmithError) as error:
        files.read_object(tmp_path / "a.json", "layers", "rows")
    assert str(error.value) == f"{tmp_path}/a.json: {told}"


def test_an_object_comes_back_with_what_is_not_asked_for(tmp_path: Path) -> None:
    files.write_json(tmp_path / "a.json", {"a": 1, "b": 2})
    assert files.read_object(tmp_path / "a.json", "a") == {"a": 1, "b": 2}


def test_a_folder_in_the_place_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(DraftsmithError, match="cannot be read \\(Is a directory\\); make it readable"):
        files.read_json(tmp_path)


def test_an_error_of_the_disk_names_what_is_written_and_the_stage(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(
            DraftsmithError,
            match=r"file/work: cannot be written \(Not a directory\); make room there \(.* run train again",
        ),
        files.writing(tmp_path / "file/work", "train"),
    ):
        (tmp_path / "file/work").mkdir()


def test_other_errors_pass_while_something_is_written(tmp_path: Path) -> None:
    with pytest.raises(KeyError), files.writing(tmp_path, "train"):
        raise KeyError("a")
