"""The stage regenerate in a folder, whoever answers: its target, its rows, and what it has written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import chats
from draftsmith import merge_answers, regenerate
from draftsmith.config import Config


def row(*texts: str, **more: Any) -> dict[str, Any]:
    """Messages from 'u: text', 'a: text', 's: text' and 't: text'."""
    names = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    return {"messages": [{"role": names[text[0]], "content": text[3:]} for text in texts], **more}


def echo(prompt: str) -> str:
    """What a target that only repeats its question answers."""
    return "to " + prompt.split("user\n")[-1].split("<|im_end|>")[0]


def answer(config: Config, folder: Path, conversations: Path, report: Path, shards: int = 1) -> None:
    """Run the stage and the one that joins its shards."""
    target, workdir = folder / "target.json", folder / "work"
    items = [f"{place}-of-{shards}" for place in range(1, shards + 1)]
    written = [folder / f"shards-{item}.json" for item in items]
    for item, path in zip(items, written, strict=True):
        regenerate.run(config, target=target, workdir=workdir, scatteritem=item, report=path)
    merge(config, folder, written, conversations, report)


def merge(
    config: Config, folder: Path, shards: list[Path], conversations: Path | None = None, report: Path | None = None
) -> None:
    """Join what ``shards`` say that they have answered."""
    merge_answers.run(
        config, target=folder / "target.json", workdir=folder / "work", shards=shards,
        conversations=conversations or folder / "out.jsonl", report=report or folder / "out.json",
    )  # fmt: skip


class Folder:
    """A folder with a target of a tokenizer alone, in which the stage is run."""

    def __init__(self, folder: Path, template: str, **described: Any) -> None:
        self.folder = folder
        self.tokenizer = chats.fast(template)
        self.tokenizer.save_pretrained(folder / "target")
        target = {
            "path": str(folder / "target"), "trust_remote_code": False, "fingerprint": "mine", "torch_dtype": "float32",
            "max_positions": 4096, "vocab_size": 320,
        }  # fmt: skip
        (folder / "target.json").write_text(json.dumps(target | described))

    def answer(self, config: Config, rows: list[dict[str, Any]], shards: int = 1) -> dict[str, Any]:
        """Run the stage on ``rows``, shard by shard, and return the report of all."""
        (self.folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        answer(config, self.folder, self.folder / "out.jsonl", self.folder / "out.json", shards)
        return dict(json.loads((self.folder / "out.json").read_text()))

    @property
    def written(self) -> list[dict[str, Any]]:
        """The rows that the stage wrote."""
        return [json.loads(line) for line in (self.folder / "out.jsonl").read_text().splitlines()]

    def texts(self) -> list[list[str]]:
        """Their messages as :func:`row` takes them."""
        return [[f"{message['role'][0]}: {message['content']}" for message in row["messages"]] for row in self.written]
