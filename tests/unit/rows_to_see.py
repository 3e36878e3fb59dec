"""Rows for the page about the data, and what a reader of that page sees of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_TEXTS = ("row_id", "conversation_id", "source", "domain", "split")
_LISTS = ("input_ids", "span_starts", "span_ends")
_NUMBERS = ("length", "supervised", "repeats")


def row(ids: Sequence[int], spans: Sequence[tuple[int, int]], **more: Any) -> dict[str, Any]:
    """A row of rows.parquet."""
    return {
        "row_id": hashlib.sha256(repr(list(ids)).encode()).hexdigest()[:32], "conversation_id": "c", "source": "s.jsonl", "domain": "chat",
        "split": "train", "input_ids": list(ids), "span_starts": [start for start, _ in spans], "span_ends": [end for _, end in spans],
        "length": len(ids), "supervised": sum(end - start for start, end in spans), "repeats": 1,
    } | more  # fmt: skip


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A rows.parquet."""
    schema = pa.schema([
        *((name, pa.string()) for name in _TEXTS), *((name, pa.list_(pa.int32())) for name in _LISTS),
        *((name, pa.int32()) for name in _NUMBERS), *([("cut", pa.bool_())] if any("cut" in given for given in rows) else []),
    ])  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, row_group_size=100)
    return path


def write_prompts(path: Path, asked: Sequence[tuple[str, str]]) -> Path:
    """A prompts.jsonl of (domain, question)."""
    lines = [
        {"prompt_id": f"{place:032x}", "domain": domain, "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]}
        for place, (domain, text) in enumerate(asked)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@dataclass
class SeenToken:
    """A token as it is on the page."""

    place: int
    id: int
    supervised: bool
    special: bool
    text: str = ""


@dataclass
class SeenRow:
    """A row as it is on the page: its tokens, its gaps in words, and the text of its description."""

    tokens: list[SeenToken] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    about: str = ""


class SeenPage(HTMLParser):
    """Reads a page as a browser does: what is supervised is inside of a ``mark``."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.rows: list[SeenRow] = []
        self.text = ""
        self.own_bytes = 0
        self.scripts = 0
        self._open: list[tuple[str, str]] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.scripts += tag == "script"
        if tag in ("meta", "link", "path", "rect", "br", "wbr"):
            return
        name = given.get("class") or ""
        self._open.append((tag, name))
        if tag == "details" and name == "sample":
            self.rows.append(SeenRow())
        if tag == "span" and (title := given.get("title") or "").startswith("place "):
            place, token = title.removeprefix("place ").split(", id ")
            supervised = ("mark", "answer") in self._open
            self.rows[-1].tokens.append(SeenToken(int(place), int(token), supervised, name == "special"))

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("meta", "link", "path", "rect", "br", "wbr"):
            assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        tags = [tag for tag, _ in self._open]
        names = [name for _, name in self._open]
        if "script" in tags or "style" in tags:
            self.own_bytes += len(data) if "plotly.js" not in data[:2000] else 0
            return
        self.text += data
        if "hidden" in names or "details" not in tags or not self.rows:
            return
        if "tokens" not in names:
            self.rows[-1].about += data
        elif any(name.startswith("gap") for name in names):
            self.rows[-1].gaps.append(data)
        elif "code" in names:
            self.rows[-1].tokens[-1].text += chr(int(data.removeprefix("U+"), 16))
        elif "part" not in names:
            self.rows[-1].tokens[-1].text += data
