"""merge_answers: what joins the shards of a regeneration (test_regenerate.py has what comes of it)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import chats
from draftsmith import merge_answers
from draftsmith.config import parse
from draftsmith.errors import DraftsmithError
from regenerate_bench import Folder, merge


def shard(tokens: int, seconds: float, by: str | None, reused: int = 0) -> dict[str, Any]:
    return {"tokens": tokens, "seconds": seconds, "by": by and {"engine": by}, "reused": reused}


@pytest.mark.parametrize(
    ("shards", "expected"),
    [
        # Side by side or one after the other: the rate is that of one.
        ([shard(600, 2.0, "vLLM"), shard(300, 1.0, "vLLM", 4)], (900, 3.0, 300.0, {"engine": "vLLM"}, 4, 2)),
        ([shard(0, 0.0, None, 9), shard(300, 2.0, "vLLM")], (300, 2.0, 150.0, {"engine": "vLLM"}, 9, 2)),
        ([shard(0, 0.0, None, 9)], (0, 0.0, None, None, 9, 1)),
    ],
)
def test_figures_of_all_shards(shards: list[dict[str, Any]], expected: tuple[Any, ...]) -> None:
    found = merge_answers.total(shards)
    names = ("tokens", "seconds", "tokens_per_second", "by", "reused", "shards")
    assert tuple(found[name] for name in names) == expected


def test_a_shard_of_other_settings_is_named(tmp_path: Path) -> None:
    Folder(tmp_path, chats.CHATML)
    config = parse({"data": {"sources": [{"path": "data.jsonl"}]}, "regenerate": {"enabled": True}}, "test")
    written = tmp_path / "1-of-1.json"
    written.write_text(json.dumps({"fingerprint": "another", "failed": [], "figures": shard(1, 1.0, "vLLM")}))
    with pytest.raises(DraftsmithError, match=r"1-of-1.json: made with other settings or by another target; delete it"):
        merge_answers.run(
            config, target=tmp_path / "target.json", workdir=tmp_path, shards=[written],
            conversations=tmp_path / "out.jsonl", report=tmp_path / "out.json",
        )  # fmt: skip
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "not valid JSON"), ("[]", "holds no JSON object; delete it"), ("null", "holds no JSON object"),
        ("{}", "lacks failed, figures, fingerprint; delete it"), ('{"failed": [], "figures": {}}', "lacks fingerprint; delete it"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_shards_is_named(tmp_path: Path, content: str, words: str) -> None:
    Folder(tmp_path, chats.CHATML)
    written = tmp_path / "1-of-1.json"
    written.write_text(content)
    config = parse({"data": {"sources": [{"path": "data.jsonl"}]}, "regenerate": {"enabled": True}}, "test")
    with pytest.raises(DraftsmithError, match=rf"1-of-1.json.*({words})"):
        merge(config, tmp_path, [written])
    assert written.exists()
