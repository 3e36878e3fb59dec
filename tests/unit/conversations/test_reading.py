"""reading: all sources in order, with weights, and what each gave."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from draftsmith.config import Data, Source, parse
from draftsmith.conversations import Conversation
from draftsmith.conversations.dropped import Dropped
from draftsmith.conversations.reading import Given, Reader, times
from draftsmith.conversations.splits import share
from draftsmith.conversations.tokenised import Tokenised
from draftsmith.errors import DraftsmithError

# Of the prompts q0 .. q999, those whose hash with the seed 0 lies below 1/4 and below 1/2: counted with hashlib alone, by the
# definitions of the prompt key and of the share.
KEPT, THRICE = 279, 516


def write(path: Path, rows: list[Any], **more: Any) -> Source:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Source(path=str(path), **more)


def read(*sources: Source, seed: int = 0) -> tuple[list[Given | Dropped], Reader]:
    reader = Reader(Data(sources=list(sources), seed=seed))
    return list(reader), reader


def asked(given: Given | Dropped) -> str:
    assert isinstance(given, Conversation)
    return str(given.messages[0]["content"])


def test_reading_goes_on_behind_a_row_that_is_left_out(tmp_path: Path) -> None:
    first = write(tmp_path / "chat.jsonl", [{"prompt": "a"}, {"messages": [{"role": "x"}]}, {"prompt": "b"}])
    second = write(tmp_path / "code.jsonl", [{"prompt": "c"}], domain="python")
    found, reader = read(first, second)
    assert [given.domain if isinstance(given, Conversation) else given for given in found] == [
        "chat", Dropped(f"{tmp_path}/chat.jsonl, line 2", "unknown_role", "'x'"), "chat", "python",
    ]  # fmt: skip
    assert [given.source_index for given in found] == [0, 0, 0, 1]
    assert [(figures.read, figures.unusable) for figures in reader.figures] == [(3, 1), (1, 0)]


def test_a_malformed_line_is_left_out_by_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n{"prompt": "c"}\n')
    found, _ = read(Source(path=str(tmp_path / "a.jsonl")))
    assert found[1] == Dropped(
        f"{tmp_path}/a.jsonl, line 2", "malformed_line", "not valid JSON (Expecting value at column 11)"
    )
    assert [asked(found[0]), asked(found[2])] == ["a", "c"]


def test_a_file_without_conversations_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        DraftsmithError, match=r"a\.jsonl: holds no conversations; its rows need messages .* the first has foo, bar"
    ):
        read(write(tmp_path / "a.jsonl", [{"foo": 1, "bar": 2}]))
    with pytest.raises(DraftsmithError, match=r"a\.jsonl: holds no conversations; data\.sources\[0\]"):
        read(write(tmp_path / "a.jsonl", []))
    (tmp_path / "c.jsonl").write_text("who are you\nI am\n")
    with pytest.raises(DraftsmithError, match=r"c\.jsonl: holds no conversations; line 1 is not valid JSON"):
        read(Source(path=str(tmp_path / "c.jsonl")))
    # In a folder, too, each file must have some.
    (tmp_path / "c.jsonl").unlink()
    write(tmp_path / "a.jsonl", [{"prompt": "a"}])
    write(tmp_path / "b.jsonl", [{"foo": 1}])
    with pytest.raises(DraftsmithError, match=r"b\.jsonl: holds no conversations"):
        read(Source(path=str(tmp_path)))


def test_a_file_in_a_folder_that_is_none_of_the_data(tmp_path: Path) -> None:
    """A file named alone is meant; in a folder it may only lie beside the data."""
    aside = r"; if it is none of the data, move it out of the folder, or name the files$"
    write(tmp_path / "a.jsonl", [{"prompt": "a"}])
    for text, end in (
        ('{"citation": "x"}', "and the first has citation"),
        ('{\n  "citation": "x"\n}\n', "or each of them on one line"),
    ):
        (tmp_path / "info.json").write_text(text)
        with pytest.raises(DraftsmithError, match=rf"info\.json: .*{end}{aside}"):
            read(Source(path=str(tmp_path)))
        with pytest.raises(DraftsmithError, match=rf"info\.json: .*{end}$"):
            read(Source(path=str(tmp_path / "info.json")))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
def test_utf_16_is_told_how_to_save_the_file(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.jsonl").write_bytes('{"prompt": "a"}\n{"prompt": "b"}\n'.encode(encoding))
    with pytest.raises(
        DraftsmithError,
        match=r"a\.jsonl: holds no conversations; line 1 is not valid UTF-8 .*; save the file as UTF-8$",
    ):
        read(Source(path=str(tmp_path / "a.jsonl")))


def test_a_folder_of_all_kinds_is_one_source(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    write(tmp_path / "a.jsonl", [{"prompt": "a"}])
    (tmp_path / "b.json").write_text(json.dumps([{"prompt": "b"}]))
    pq.write_table(pa.Table.from_pylist([{"prompt": "c"}]), tmp_path / "c.parquet")
    found, reader = read(Source(path=str(tmp_path)))
    assert [asked(given) for given in found] == ["a", "b", "c"]
    assert [figures.read for figures in reader.figures] == [3]


@pytest.mark.parametrize(("path", "called"), [("{}/f", "{}/f"), ("./f/", "f"), ("~/f", "~/f")])
def test_a_row_without_an_id_is_called_by_its_file_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, called: str
) -> None:
    """With the folder as the config writes it; where it lies is told in the same words for all rows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "f/sub").mkdir(parents=True)
    write(
        tmp_path / "f/a.jsonl",
        [{"prompt": "a"}, {"prompt": "b", "id": "mine"}, {"input_ids": [5, 6], "loss_mask": [0, 1]}],
    )
    write(tmp_path / "f/b.jsonl", [{"prompt": "c"}, {"messages": [{"role": "x"}]}])
    (tmp_path / "f/sub/c.json").write_text(json.dumps([{"prompt": "d"}]))
    path, called = path.format(tmp_path), called.format(tmp_path)
    found, _ = read(Source(path=path))
    good = [given for given in found if not isinstance(given, Dropped)]
    assert [given.conversation_id for given in good] == [
        f"{called}/a.jsonl:1", "mine", f"{called}/a.jsonl:3", f"{called}/b.jsonl:1", f"{called}/sub/c.json:1",
    ]  # fmt: skip
    opened = called.replace("~", str(tmp_path))
    assert [given.where for given in found] == [
        *(f"{opened}/a.jsonl, line {number}" for number in (1, 2, 3)), *(f"{opened}/b.jsonl, line {number}" for number in (1, 2)),
        f"{opened}/sub/c.json, row 1",
    ]  # fmt: skip


@pytest.mark.parametrize("path", ["{}/f.jsonl", "./f.jsonl", "~/f.jsonl", "../{name}/f.jsonl"])
def test_a_row_of_a_single_file_is_called_by_it_as_the_config_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "f.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    path = path.format(tmp_path, name=tmp_path.name)
    found, _ = read(Source(path=path))
    assert [given.conversation_id for given in found if isinstance(given, Conversation)] == [f"{path}:1", f"{path}:2"]


def test_how_often_by_hand() -> None:
    """The whole part always, once more for those whose seeded hash lies below the rest."""
    for weight, whole, rest in ((0.25, 0, 0.25), (1.0, 1, 0.0), (2.5, 2, 0.5), (3.0, 3, 0.0)):
        for number in range(50):
            lies_below = share(7, "weight", f"k{number}") < rest
            assert times(weight, 7, f"k{number}") == (whole + 1 if lies_below else whole)


def test_a_weight_below_one_keeps_that_share(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{number}"} for number in range(1000)]
    found, reader = read(write(tmp_path / "a.jsonl", rows, weight=0.25))
    kept = [asked(given) for given in found if isinstance(given, Conversation)]
    assert len(kept) == KEPT
    assert reader.figures[0].as_json() == {
        "path": f"{tmp_path}/a.jsonl", "revision": None, "weight": 0.25, "read": 1000, "not_sampled": 1000 - KEPT, "unusable": 0,
    }  # fmt: skip
    assert Counter(given.reason for given in found if isinstance(given, Dropped)) == {"not_sampled": 1000 - KEPT}
    # Other rows, in another order, change nothing; another seed does.
    more, _ = read(write(tmp_path / "a.jsonl", [{"prompt": "new"}, *rows[::-1]], weight=0.25))
    assert {asked(given) for given in more if isinstance(given, Conversation)} - {"new"} == set(kept)
    other, _ = read(write(tmp_path / "a.jsonl", rows, weight=0.25), seed=1)
    assert {asked(given) for given in other if isinstance(given, Conversation)} != set(kept)
    # A larger weight keeps these and others, so that what was computed for them is of use.
    half, _ = read(write(tmp_path / "a.jsonl", rows, weight=0.5))
    assert {asked(given) for given in half if isinstance(given, Conversation)} > set(kept)


def test_what_was_asked_decides_and_not_the_answer(tmp_path: Path) -> None:
    def answered(answer: str) -> list[Any]:
        return [{"id": number, "prompt": f"q{number}", "response": answer} for number in range(100)]

    kept = []
    for answer in ("one", "two"):
        found, _ = read(write(tmp_path / "a.jsonl", answered(answer), weight=0.3))
        kept.append([given.conversation_id for given in found if isinstance(given, Conversation)])
    assert kept[0] == kept[1]
    assert 0 < len(kept[0]) < 100


def test_a_weight_above_one_says_how_often_a_pass_takes_it(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{number}"} for number in range(1000)]
    often = write(tmp_path / "a.jsonl", rows, weight=2.5)
    once = write(tmp_path / "b.jsonl", [{"prompt": "b"}])
    found, _ = read(often, once)
    seen = Counter(given.repeats for given in found if isinstance(given, Conversation) and given.source_index == 0)
    assert seen == {2: 1000 - THRICE, 3: THRICE}
    assert [given.repeats for given in found if isinstance(given, Conversation)][1000] == 1


def test_unusable_rows_keep_their_share_under_a_weight(tmp_path: Path) -> None:
    """Half of 2,000 rows are bad, and of both halves a tenth is left, or the share of bad ones would be nearly all."""
    rows = [row for number in range(1000) for row in ({"prompt": f"q{number}"}, {"messages": [{"role": "x"}]})]
    found, reader = read(write(tmp_path / "a.jsonl", rows, weight=0.1))
    bad = sum(isinstance(given, Dropped) and given.reason == "unknown_role" for given in found)
    good = sum(isinstance(given, Conversation) for given in found)
    assert reader.figures[0].unusable == bad
    assert 70 <= good <= 130
    assert 70 <= bad <= 130


@pytest.mark.parametrize("weight", [0, -1, 1000, float("nan")])
def test_a_weight_out_of_range_is_refused_with_its_key(weight: float) -> None:
    with pytest.raises(DraftsmithError, match=r"data\.sources\.0\.weight: "):
        parse({"data": {"sources": [{"path": "a.jsonl", "weight": weight}]}}, "my.yaml")


def test_tokens_and_messages_in_one_source(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [{"id": "t", "input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, {"prompt": "a"}])
    first, second = read(source)[0]
    assert isinstance(first, Tokenised)
    assert first.conversation_id == "t"
    assert isinstance(second, Conversation)


@pytest.mark.parametrize("name", ["conversations", "conversations-sampled"])
def test_the_demos_answers_are_those_that_its_target_wrote(repo: Path, name: str) -> None:
    """Each still has its note, so none was edited, and reading makes the same of it as when it was written."""
    found, _ = read(Source(path=str(repo / f"config/demo/{name}.jsonl")))
    assert len(found) == 320
    assert all(isinstance(given, Conversation) and given.generated for given in found)
