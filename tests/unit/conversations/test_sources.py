"""sources: JSONL, JSON, Parquet, folders and hub data sets; sentences that name file and line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftsmith.config import Source
from draftsmith.conversations.sources import default_domain, read_source
from draftsmith.errors import DraftsmithError

ROWS = [{"prompt": "a"}, {"prompt": "ü"}, {"prompt": "c"}]


def lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def read(path: Path | str, **more: Any) -> list[Any]:
    return [row.value for row in read_source(Source(path=str(path), **more), 0)]


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\ufeff" + lines(ROWS[:1]) + "\n  \n" + lines(ROWS[1:]))
    assert read(path) == ROWS
    assert read(path, limit=2) == ROWS[:2]
    assert [row.place for row in read_source(Source(path=str(path)), 0)] == ["line 1", "line 4", "line 5"]


def test_other_files(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("  " + json.dumps(ROWS))
    (tmp_path / "lines.json").write_text(lines(ROWS))
    (tmp_path / "z.jsonl.gz").write_bytes(gzip.compress(lines(ROWS).encode()))
    for name in ("list.json", "lines.json", "z.jsonl.gz"):
        assert read(tmp_path / name) == ROWS


def test_parquet_rows_lose_the_keys_that_they_never_had(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "tool", "content": "b", "tool_call_id": "1"}]
    pq.write_table(pa.Table.from_pylist([{"messages": messages, "domain": None}]), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == [{"messages": messages}]


def test_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.jsonl").write_text(lines([{"prompt": "b"}]))
    (tmp_path / "a.json").write_text(json.dumps([{"prompt": "a"}]))
    (tmp_path / "sub" / "c.jsonl").write_text(lines([{"prompt": "c"}]))
    (tmp_path / "notes.txt").write_text("not read")
    assert [row["prompt"] for row in read(tmp_path)] == ["a", "b", "c"]


def test_a_broken_line_is_a_row_with_a_fault_and_reading_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "b"\n{"prompt": "\xff"}\n' + b"[" * 100_000 + b'\n{"prompt": "e"}\n')
    found = list(read_source(Source(path=str(path)), 0))
    assert [row.value for row in found] == [{"prompt": "a"}, None, None, None, {"prompt": "e"}]
    assert [row.place for row in found] == [f"line {number}" for number in range(1, 6)]
    assert found[1].fault == "not valid JSON (Expecting ',' delimiter at column 15)"
    assert found[2].fault == "not valid UTF-8 at byte 13 of the line"
    assert found[3].fault.startswith(("nested too deeply", "not valid JSON"))
    assert not found[0].fault
    assert not found[4].fault


def test_a_file_that_cannot_be_read_on_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"prompt": "a"},\n{"prompt"}]')
    with pytest.raises(DraftsmithError, match=r"a\.json, line 2: not valid JSON"):
        read(tmp_path / "a.json")
    (tmp_path / "z.jsonl.gz").write_bytes(gzip.compress(lines(ROWS * 1000).encode())[:-20])
    with pytest.raises(DraftsmithError, match=r"z\.jsonl\.gz: the compressed file is damaged after line \d+"):
        read(tmp_path / "z.jsonl.gz")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DraftsmithError, match=r"a\.parquet: not readable as Parquet"):
        read(tmp_path / "a.parquet")


def test_a_folder_by_the_name_of_a_file_is_gone_into(tmp_path: Path) -> None:
    (tmp_path / "sub.jsonl").mkdir()
    (tmp_path / "sub.jsonl" / "b.jsonl").write_text(lines(ROWS[1:]))
    (tmp_path / "a.jsonl").write_text(lines(ROWS[:1]))
    assert read(tmp_path) == ROWS


def test_a_link_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(lines(ROWS))
    (tmp_path / "b.jsonl").symlink_to("a.jsonl")
    assert read(tmp_path) == ROWS + ROWS
    (tmp_path / "c.jsonl").symlink_to("gone.jsonl")
    for path in (tmp_path, tmp_path / "c.jsonl"):
        with pytest.raises(
            DraftsmithError, match=r"c\.jsonl: a link to gone\.jsonl, which is not there; mend the link or remove it$"
        ):
            read(path)


@pytest.mark.parametrize("compression", ["snappy", "none"])
def test_a_parquet_file_with_flipped_bytes_is_named(tmp_path: Path, compression: str) -> None:
    """The pages of compressed columns are damaged; of others the texts, which are no UTF-8 any more."""
    path = tmp_path / "a.parquet"
    table = pa.Table.from_pylist([{"prompt": f"prompt {number} " * 20} for number in range(500)])
    pq.write_table(table, path, compression=compression, use_dictionary=False, write_statistics=False)
    data = bytearray(path.read_bytes())
    for place in range(len(data) // 4, len(data) // 2):
        data[place] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(
        DraftsmithError, match=r"a\.parquet: not readable as Parquet after row \d+ \(.+\); fetch or write"
    ):
        read(path)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[" * 100_000 + "]" * 100_000, "nested too deeply to be conversations; mend the file or write it as JSONL"),
        (
            '[{"prompt": "a", "n": ' + "1" * 5000 + "}]",
            "not valid JSON (Exceeds the limit (4300 digits) for integer string conversion: value has 5000 digits); "
            "mend the file or write it as JSONL",
        ),
        (
            json.dumps(ROWS[0], indent=2),
            "one JSON object over several lines, neither a list nor JSON lines; write the conversations as a list, "
            "or each of them on one line",
        ),
    ],
    ids=["deep", "digits", "object"],
)
def test_a_json_file_that_is_no_list_of_rows_is_named(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(DraftsmithError) as caught:
        read(path)
    assert str(caught.value) == f"{path}: {sentence}"


def test_a_first_line_that_breaks_off_is_not_taken_for_one_object(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"prompt": \n' + lines(ROWS))
    assert read(tmp_path / "a.json") == [None, *ROWS]
    (tmp_path / "b.json").write_text(lines(ROWS[:1]))
    assert read(tmp_path / "b.json") == ROWS[:1]


def test_what_is_not_gzip_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_text(lines(ROWS))
    with pytest.raises(DraftsmithError, match=r"a\.jsonl\.gz: not compressed by gzip; take \.gz off its name"):
        read(tmp_path / "a.jsonl.gz")


def test_a_file_that_the_system_cannot_read_is_named(tmp_path: Path) -> None:
    """Page 0 of a process is mapped by nobody, so that reading it fails for every user."""
    (tmp_path / "a.jsonl").symlink_to("/proc/self/mem")
    with pytest.raises(DraftsmithError, match=r"a\.jsonl: could not be read \(Input/output error\); check its"):
        read(tmp_path / "a.jsonl")


def test_missing_files_name_the_key(tmp_path: Path) -> None:
    with pytest.raises(DraftsmithError, match=r"none\.jsonl: no such file; data\.sources\[3\]\.path"):
        list(read_source(Source(path=str(tmp_path / "none.jsonl")), 3))
    with pytest.raises(DraftsmithError, match=r"the folder that data\.sources\[0\]\.path names holds no \.jsonl"):
        read(tmp_path)
    (tmp_path / "a.csv").write_text("")
    with pytest.raises(DraftsmithError, match="of no known kind"):
        read(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("path", "domain"),
    [
        ("data/chat.jsonl", "chat"),
        ("data/chat.jsonl.gz", "chat"),
        ("data/all/", "all"),
        ("hub:org/name:config", "name"),
    ],
)
def test_default_domain(path: str, domain: str) -> None:
    assert default_domain(Source(path=path)) == domain


def test_the_default_domain_is_described_with_its_key(repo: Path) -> None:
    """In the table of all keys, which is made of the config model."""
    [line] = [
        line for line in (repo / "config/README.md").read_text().splitlines() if "| `data.sources[].domain` |" in line
    ]
    assert "unset: the name of the file (without its ending), folder or hub data set" in line
