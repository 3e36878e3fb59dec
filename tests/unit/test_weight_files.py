"""Heads, lengths and the index of a checkpoint's files: one sentence for each that is broken, with the file and the mend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.errors import DraftsmithError
from draftsmith.target_weights import loaded_bytes, tensor_files
from draftsmith.weight_files import head, read_config, weight_map, whole_head


def file_of(folder: Path, entries: Any, data: int = 0) -> Path:
    text = json.dumps(entries).encode()
    path = folder / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))
    return path


def entry(begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [1], "data_offsets": [begin, end]}


def test_a_sound_file(tmp_path: Path) -> None:
    entries = {"__metadata__": {"format": "pt"}, "a": entry(0, 3), "b": entry(3, 8)}
    path = file_of(tmp_path, entries, 8)
    assert head(path) == (json.dumps(entries).encode(), entries)
    assert whole_head(path) == entries


@pytest.mark.parametrize(
    "entries",
    [
        [],
        "x",
        {"a": 1},
        {"a": {"data_offsets": [0, 1]}},
        {"a": entry(0, "1")},
        {"a": entry(2, 1)},
        {"a": entry(True, 1)},
    ],
)
def test_what_is_no_head(tmp_path: Path, entries: Any) -> None:
    with pytest.raises(DraftsmithError, match=r"model\.safetensors: not a safetensors file; fetch it again$"):
        head(file_of(tmp_path, entries))


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file_of(tmp_path, {"a": entry(0, 3)}, 2)
    size = path.stat().st_size
    with pytest.raises(
        DraftsmithError, match=rf"is {size} bytes long and should be {size + 1}; complete the download$"
    ):
        whole_head(path)
    with pytest.raises(DraftsmithError, match=r"gone\.safetensors: is gone; put the checkpoint's files back"):
        head(tmp_path / "gone.safetensors")
    (tmp_path / "x.safetensors").mkdir()
    with pytest.raises(
        DraftsmithError, match=r"x\.safetensors: is a folder with the name of weights; give it another name$"
    ):
        head(tmp_path / "x.safetensors")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("draftsmith.weight_files.open", refuse, raising=False)
    with pytest.raises(DraftsmithError, match=r"cannot be read \(Permission denied\); make it readable for this user$"):
        head(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"weight_map": {"a"', r"not valid JSON \(.*\); fetch it again"),
        ('{"metadata": {}}', "has no weight_map from tensors to files; fetch it again"),
        ("[]", "has no weight_map"),
        ('{"weight_map": []}', "has no weight_map"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": {"a": 1}}', "has no weight_map"),
    ],
)
def test_an_index_that_is_broken(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    file_of(tmp_path, {"a": entry(0, 3)}, 3)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    for call in (weight_map, tensor_files, lambda folder: loaded_bytes(folder, "float32")):
        with pytest.raises(DraftsmithError, match=rf"model\.safetensors\.index\.json: {said}"):
            call(tmp_path)


def test_without_an_index(tmp_path: Path) -> None:
    assert weight_map(tmp_path) is None


def test_a_config_that_is_gone_or_broken(tmp_path: Path) -> None:
    with pytest.raises(
        DraftsmithError, match=r"config\.json: cannot be read \(No such file or directory\); put it back"
    ):
        read_config(tmp_path)
    for content, said in (("{", "not valid JSON"), ("[]", "holds no JSON object")):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(DraftsmithError, match=rf"config\.json: {said}.*; fetch the checkpoint again$"):
            read_config(tmp_path)


def test_weights_that_are_gone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DraftsmithError, match=r"its \.safetensors files are gone; put them back"):
        loaded_bytes(tmp_path, "float32")
    index = {"weight_map": {"a": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DraftsmithError, match=r"model-1\.safetensors: is gone"):
        loaded_bytes(tmp_path, "float32")
