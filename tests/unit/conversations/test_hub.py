"""hub: data sets by id, config and split, pinned to one commit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub
import pytest

from draftsmith.config import Data, Source
from draftsmith.conversations import Conversation, hub
from draftsmith.conversations.reading import Reader
from draftsmith.errors import DraftsmithError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROWS = [{"prompt": "a"}, {"prompt": "ü"}]


class Loaded(list[Any]):
    """Rows with the files that they come from, as a loaded data set names them."""

    def __init__(self, rows: list[Any], commit: str = COMMIT) -> None:
        super().__init__(rows)
        self.download_checksums = {f"hf://datasets/org/name@{commit}/data/train.jsonl": {"num_bytes": 1}}


class Hub:
    """Stands for the hub: what is asked is in ``looked_up`` and ``loaded``."""

    def __init__(self) -> None:
        self.looked_up: list[tuple[str, str | None]] = []
        self.loaded: list[tuple[str, str | None, str | None, str]] = []
        self.answer: Any = Loaded(ROWS)

    def dataset_info(self, _: Any, name: str, *, revision: str | None) -> Any:
        self.looked_up.append((name, revision))
        return SimpleNamespace(sha=COMMIT)

    def load_dataset(self, name: str, config: str | None, *, split: str | None, revision: str) -> Any:
        self.loaded.append((name, config, split, revision))
        return self.answer


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Hub:
    stand_in = Hub()
    monkeypatch.setattr(
        huggingface_hub.HfApi, "dataset_info", lambda *args, **more: stand_in.dataset_info(*args, **more)
    )
    monkeypatch.setattr(datasets, "load_dataset", stand_in.load_dataset)
    return stand_in


def read(path: str, **more: Any) -> tuple[list[str], Reader]:
    reader = Reader(Data(sources=[Source(path=path, **more)]))
    found = [given.messages[0]["content"] for given in reader if isinstance(given, Conversation)]
    return found, reader


def test_the_newest_commit_is_looked_up_once_loaded_and_recorded(
    asked: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    found, reader = read("hub:org/name:main:test")
    assert found == ["a", "ü"]
    assert asked.looked_up == [("org/name", None)]
    assert asked.loaded == [("org/name", "main", "test", COMMIT)]
    assert reader.figures[0].as_json() == {
        "path": "hub:org/name:main:test", "revision": COMMIT, "weight": 1.0, "read": 2, "not_sampled": 0, "unusable": 0,
    }  # fmt: skip
    printed = capsys.readouterr()
    assert f"hub:org/name:main:test: revision newest is commit {COMMIT}" in printed.out + printed.err
    # Read once more in the same run, it is the same commit.
    list(reader.again())
    assert asked.looked_up == [("org/name", None)]
    assert asked.loaded[1] == asked.loaded[0]


def test_a_commit_is_taken_as_it_is_and_a_branch_is_looked_up(asked: Hub) -> None:
    read("hub:org/name", revision=COMMIT)
    assert asked.looked_up == []
    assert asked.loaded == [("org/name", None, None, COMMIT)]
    _, reader = read("hub:org/name", revision="v2")
    assert asked.looked_up == [("org/name", "v2")]
    assert asked.loaded[1] == ("org/name", None, None, COMMIT)
    assert reader.figures[0].revision == COMMIT


def test_splits(asked: Hub) -> None:
    asked.answer = {"test": Loaded([]), "train": Loaded(ROWS)}
    assert read("hub:org/name")[0] == ["a", "ü"]
    asked.answer = {"only": Loaded(ROWS)}
    assert read("hub:org/name")[0] == ["a", "ü"]
    asked.answer = {"a": Loaded(ROWS), "b": Loaded(ROWS)}
    with pytest.raises(DraftsmithError, match=r"has the splits a, b; name one in data\.sources\[0\]\.path"):
        read("hub:org/name")


def test_another_commit_on_this_machine_is_refused(asked: Hub) -> None:
    """Without a network datasets loads what it loaded last, whatever it was asked for."""
    asked.answer = Loaded(ROWS, "f" * 40)
    with pytest.raises(
        DraftsmithError, match=f"commit {COMMIT} was asked for, but what is on this machine is {'f' * 40}"
    ):
        read("hub:org/name", revision=COMMIT)


def test_what_the_hub_refuses_is_one_sentence(asked: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("no\nroute")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(
        DraftsmithError, match=r"hub:org/name: the data set could not be loaded .*ConnectionError: no route"
    ):
        read("hub:org/name")
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", fail)
    with pytest.raises(
        DraftsmithError,
        match=r"the hub did not tell the commit of its revision \(the newest\) .* set data\.sources\[0\]\.revision",
    ):
        read("hub:org/name")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("hub:name", ("name", None, None)),
        ("hub:org/name:config", ("org/name", "config", None)),
        ("hub:org/name:config:train[:10%]", ("org/name", "config", "train[:10%]")),
        ("hub:org/name::test", ("org/name", None, "test")),
    ],
)
def test_parts(path: str, expected: tuple[str, str | None, str | None]) -> None:
    assert hub.parts(path) == expected


def test_a_local_builder_is_read_through_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real load_dataset, on a folder in place of a hub id: structs lose the keys that a row never had."""
    (tmp_path / "name").mkdir()
    (tmp_path / "name/train.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a", "tool_calls": null}]}\n'
        '{"messages": [{"role": "user", "content": "v", "name": "n"}]}\n'
    )
    monkeypatch.setattr(hub, "commit", lambda source, key: COMMIT)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    reader = Reader(Data(sources=[Source(path=f"hub:{tmp_path}/name")]))
    assert [given.messages for given in reader if isinstance(given, Conversation)] == [
        [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}],
        [{"role": "user", "content": "v", "name": "n"}],
    ]
