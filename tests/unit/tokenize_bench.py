"""A folder in which the stage tokenize is run on a few conversations with a tiny tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

import chats
from draftsmith import tokenize
from draftsmith.config import parse


class Bench:
    """A folder with a tokenizer, and the stage run in it."""

    def __init__(self, folder: Path, template: str = chats.CHATML, special: str = "chatml", **target: Any) -> None:
        self.folder = folder
        self.tokenizer = chats.fast(template, special)
        self.tokenizer.save_pretrained(folder / "model")
        described = {
            "path": str(folder / "model"),
            "trust_remote_code": False,
            "vocab_size": 320,
            "fingerprint": "mine",
            "max_positions": 4096,
        }
        (folder / "target.json").write_text(json.dumps(described | target))
        self.data = folder / "data.jsonl"
        # Where set, what an earlier run made is taken from there.
        self.workdir: Path | None = None

    def run(
        self,
        rows: list[dict[str, Any]],
        regenerated: bool = False,
        dropped: float = 1.0,
        sources: list[dict[str, Any]] | None = None,
        **settings: Any,
    ) -> dict[str, Any]:
        """Run the stage on ``rows``, or on ``sources``; ``settings`` are tokenize's. Returns tokenize.json's content."""
        if sources is None:
            self.data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        values = {
            "data": {"sources": sources or [{"path": str(self.data)}], "max_dropped_fraction": dropped},
            "tokenize": {
                "min_supervised_tokens": 1,
                "evaluation_per_domain": 0,
                "validation_fraction": 0.0,
                "max_length": 512,
                **settings,
            },
        }
        tokenize.run(
            parse(values, "test"),
            target=self.folder / "target.json",
            conversations=self.data if regenerated else None,
            rows=self.folder / "out" / "rows.parquet",
            prompts=self.folder / "out" / "prompts.jsonl",
            report=self.folder / "out" / "tokenize.json",
            workdir=self.workdir,
        )
        return dict(json.loads((self.folder / "out" / "tokenize.json").read_text()))

    @property
    def rows(self) -> pd.DataFrame:
        return pd.read_parquet(self.folder / "out" / "rows.parquet")

    @property
    def prompts(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "out" / "prompts.jsonl").read_text().splitlines()]

    def supervised(self, row: Any) -> list[str]:
        return [
            self.tokenizer.decode(row.input_ids[start:end])
            for start, end in zip(row.span_starts, row.span_ends, strict=True)
        ]


def conversation(*texts: str, **more: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "assistant" if n % 2 else "user", "content": text} for n, text in enumerate(texts)],
        **more,
    }


def many(count: int, **more: Any) -> list[dict[str, Any]]:
    return [conversation(f"what is {n}", f"The answer is {n}", id=f"c{n}", **more) for n in range(count)]
