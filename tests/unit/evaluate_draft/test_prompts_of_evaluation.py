"""prompts.jsonl as evaluation reads it, and what is said of one that was harmed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftsmith.errors import DraftsmithError
from draftsmith.evaluate_draft import read_prompts

ONE = {"prompt_id": "1", "domain": "b", "prompt_token_ids": [1, 2]}
OTHER = {"prompt_id": "2", "domain": "a\u2028c", "prompt_token_ids": [3]}


def test_domains_come_one_after_the_other(tmp_path: Path) -> None:
    """A separator of lines in Unicode's sense ends none of JSON's."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in (ONE, OTHER, ONE)))
    assert read_prompts(path) == [OTHER, ONE, ONE]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (json.dumps(ONE) + '\n{"prompt_id": "2", "dom', "line 2 is no JSON (is it cut off?); delete the file and run tokenize again"),
        (json.dumps(ONE | {"domain": None}), "line 1 has no domain; delete the file and run tokenize again"),
        (json.dumps(ONE | {"prompt_token_ids": []}), "line 1 has no prompt_token_ids; delete the file and run tokenize again"),
        ("[1]", "line 1 has no prompt_id; delete the file and run tokenize again"),
        ("", "no prompts were kept for evaluation; raise tokenize.evaluation_per_domain"),
        (None, "cannot be read (No such file or directory); run tokenize again"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_named(text: str | None, told: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DraftsmithError) as error:
        read_prompts(path)
    assert str(error.value) == f"{path}: {told}"
