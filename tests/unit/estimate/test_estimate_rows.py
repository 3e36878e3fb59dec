"""Rows: as rows.parquet has them, or as a sample of the conversations lets expect."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from targets import SMOLLM, given

import tiny
from draftsmith.errors import DraftsmithError
from draftsmith.estimate.rows import Planned, planned


def conversation(words: int, answers: int = 1) -> dict[str, Any]:
    messages = []
    for _ in range(answers):
        messages += [{"role": "user", "content": "abcd" * 5}, {"role": "assistant", "content": "abcd" * words}]
    return {"messages": messages}


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def of(tmp_path: Path, source: Path | str, results: Path | None = None, **sections: Any) -> Planned:
    weight = sections.pop("weight", 1.0)
    limit = sections.pop("limit", None)
    target = given(
        tmp_path / "target",
        SMOLLM,
        data={"sources": [{"path": str(source), "weight": weight, "limit": limit}]},
        **sections,
    )
    return planned(target.config, target, results or tmp_path / "none", None, None)


def test_rows_that_are_there_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "results" / "tokenize"
    folder.mkdir(parents=True)
    pd.DataFrame(
        {
            # The third row is the first once more: the store holds it once, training takes it twice.
            "row_id": ["a", "b", "a", "c"], "length": [10, 20, 10, 40], "split": ["train", "train", "train", "validation"],
            "supervised": [5, 8, 5, 20], "repeats": [1, 3, 1, 1], "span_ends": [[9], [15], [9], [40]],
        }
    ).to_parquet(folder / "rows.parquet")  # fmt: skip
    lines(folder / "prompts.jsonl", [{"prompt_id": "x"}, {"prompt_id": "y"}])
    found = of(tmp_path, "nothing.jsonl", tmp_path / "results")
    assert found.stored == [10, 20, 40]
    assert (found.training, found.repeats) == ([10, 20, 10], [1, 3, 1])
    told = found.told
    assert (told.how, told.rows, told.tokens, told.longest, told.prompts) == ("known", 3, 70, 40, 2)
    assert told.training_tokens == 10 + 60 + 10
    assert told.supervised_tokens == 38
    cut = of(tmp_path, "nothing.jsonl", tmp_path / "results", extract={"supervised_only": True})
    # Cut after the last supervised token; training still counts in whole rows.
    assert cut.stored == [9, 15, 40]
    assert cut.told.training_tokens == 80


def test_characters_where_there_is_no_tokenizer(tmp_path: Path) -> None:
    # 20 and 40 characters: 5 + 10 tokens, and 5 around each of the two messages.
    source = lines(tmp_path / "all.jsonl", [conversation(10)] * 40)
    found = of(tmp_path, source, tokenize={"evaluation_per_domain": 4, "validation_fraction": 0.25})
    assert found.told.how == "estimated"
    assert "4 characters a token" in found.told.explained
    assert (found.told.conversations, found.told.prompts, found.told.rows) == (40, 4, 36)
    assert found.stored == [25] * 36
    assert len(found.training) == 27
    # An answer is supervised with the token that ends it.
    assert found.told.supervised_tokens == 36 * 11


def test_the_targets_own_tokenizer_counts_what_tokenize_would(tmp_path: Path) -> None:
    made = tiny.tokenizer()
    made.save_pretrained(tmp_path / "target")
    rows = [conversation(place, 1 + place % 3) for place in range(1, 60)]
    found = of(
        tmp_path,
        lines(tmp_path / "c.jsonl", rows),
        tokenize={"evaluation_per_domain": 0, "validation_fraction": 0, "max_length": 8192},
    )
    real = [len(made.apply_chat_template(row["messages"], tokenize=True)["input_ids"]) for row in rows]
    assert "tokenizer" in found.told.explained
    assert found.stored == real


def test_long_rows_are_cut_or_dropped(tmp_path: Path) -> None:
    source = lines(tmp_path / "c.jsonl", [conversation(10), conversation(1000)] * 10)
    settings = {"evaluation_per_domain": 0, "validation_fraction": 0, "max_length": 100}
    assert sorted(set(of(tmp_path, source, tokenize=settings).stored)) == [25, 100]
    dropped = of(tmp_path, source, tokenize=settings | {"truncate": "drop"})
    assert (set(dropped.stored), len(dropped.stored)) == ({25}, 10)


def test_a_large_file_is_counted_by_its_lines(tmp_path: Path) -> None:
    random.seed(3)
    rows = [conversation(random.randint(1, 400)) for _ in range(8000)]
    source = lines(tmp_path / "large.jsonl", rows)
    assert source.stat().st_size > 4 << 20
    found = of(
        tmp_path,
        source,
        tokenize={"evaluation_per_domain": 0, "validation_fraction": 0, "max_length": 100_000},
        train={"pack_tokens": 100_000},
    )
    real = sum(5 + len(row["messages"][1]["content"]) // 4 + 2 * 5 for row in rows)
    assert found.told.conversations == pytest.approx(8000, rel=0.15)
    assert found.told.tokens == pytest.approx(real, rel=0.1)
    assert len(found.stored) == found.told.rows


@pytest.mark.parametrize("name", ["c.jsonl.gz", "c.parquet", "c.json", "folder"])
def test_other_kinds_of_files(tmp_path: Path, name: str) -> None:
    rows = [conversation(10)] * 700
    path = tmp_path / name
    if name.endswith(".gz"):
        with gzip.open(path, "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    elif name.endswith(".parquet"):
        pd.DataFrame(rows).to_parquet(path)
    elif name.endswith(".json"):
        path.write_text(json.dumps(rows))
    else:
        path.mkdir()
        lines(path / "a.jsonl", rows[:300])
        lines(path / "b.jsonl", rows[300:])
    found = of(tmp_path, path, tokenize={"evaluation_per_domain": 0, "validation_fraction": 0})
    assert found.told.conversations == pytest.approx(700, rel=0.02)
    assert set(found.stored) == {25}


def test_limits_and_weights(tmp_path: Path) -> None:
    source = lines(tmp_path / "c.jsonl", [conversation(10)] * 100)
    settings = {"evaluation_per_domain": 0, "validation_fraction": 0}
    assert of(tmp_path, source, limit=30, tokenize=settings).told.rows == 30
    # A quarter of the conversations, and each of them once.
    less = of(tmp_path, source, weight=0.25, tokenize=settings)
    assert (less.told.rows, less.told.training_tokens) == (25, 25 * 25)
    # All of them, extracted once and trained on twice.
    more = of(tmp_path, source, weight=2.0, tokenize=settings)
    assert (more.told.rows, more.told.training_tokens, set(more.repeats)) == (100, 100 * 25 * 2, {2})


def test_answers_that_are_still_to_be_written(tmp_path: Path) -> None:
    source = lines(tmp_path / "c.jsonl", [{"prompt": "abcd" * 5}] * 20 + [conversation(999, 2)] * 20)
    settings = {"evaluation_per_domain": 0, "validation_fraction": 0}
    found = of(tmp_path, source, tokenize=settings, regenerate={"enabled": True, "max_tokens": 100})
    # One answer, or two, of at most 100 tokens each; whatever stands there now plays no part.
    assert found.told.answers == 60
    assert found.told.answer_tokens == 6000
    assert set(found.stored) == {(5 + 5) + (100 + 5), 2 * (5 + 5) + 2 * (100 + 5)}
    (tmp_path / "results" / "regenerate").mkdir(parents=True)
    (tmp_path / "results/regenerate/regenerate.json").write_text(json.dumps({"answers": 10, "answer_tokens": 400}))
    again = of(
        tmp_path, source, tmp_path / "results", tokenize=settings, regenerate={"enabled": True, "max_tokens": 100}
    )
    assert again.told.answer_tokens == 60 * 40


def test_what_cannot_be_known_is_said(tmp_path: Path) -> None:
    with pytest.raises(DraftsmithError, match=r"hub:someone/chats: .* give --rows and --row-tokens"):
        of(tmp_path, "hub:someone/chats")
    target = given(tmp_path / "t", SMOLLM)
    with pytest.raises(DraftsmithError, match="go together"):
        planned(target.config, target, tmp_path, 10, None)
    assert planned(target.config, target, tmp_path, 10, 300).told.tokens == 3000
