"""The check 'served prompts': rows begin as vLLM's chat endpoint would begin them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from looked_at import Make, change_config, write_rows

from draftsmith.preflight import served
from draftsmith.preflight.subject import Subject
from draftsmith.verdict import Skip

pytest.importorskip("vllm")

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is it"}]


def sampled(subject: Subject, conversation: str = "c1", **more: Any) -> Subject:
    """The run with a sample of one row, which is written as the stage tokenize would."""
    ids = subject.chat.encode(subject.chat.render(MESSAGES, None, prompt=True)).ids
    write_rows(subject.rows, [[*ids, 5, 2]])
    [identity] = pd.read_parquet(subject.rows).row_id
    one = {
        "conversation_id": conversation,
        "source": "a.jsonl",
        "messages": MESSAGES,
        "row_id": identity,
        "prompt_tokens": len(ids),
    }
    subject.tokenised["served_sample"] = [*subject.tokenised.get("served_sample", []), one | more]
    return subject


def test_prompts_are_the_same(make: Make) -> None:
    subject = sampled(make())
    assert served.prompts(subject) == ("ok", "1 prompts of 1 source are what vLLM sends, byte for byte")
    # A row that is kept for evaluation is not in the table; its prompt is compared all the same.
    subject.tokenised["served_sample"].append({"conversation_id": "c2", "source": "b", "messages": MESSAGES, "row_id": "f" * 32, "prompt_tokens": 3})  # fmt: skip
    assert served.prompts(subject) == ("ok", "2 prompts of 2 sources are what vLLM sends, byte for byte")


def test_without_a_sample_two_turns_are_compared(make: Make) -> None:
    assert served.prompts(make()) == ("ok", "1 prompts of 1 source are what vLLM sends, byte for byte")


def test_arguments_that_the_template_of_the_server_is_given(make: Make, model: Path) -> None:
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}{{ m.content }}{{ style }}{% endfor %}{% if add_generation_prompt %}A{% endif %}"
    )
    assert served.prompts(sampled(make(model, settings={"tokenize": {"template_args": {"style": "terse"}}})))[0] == "ok"


def test_a_template_that_vllm_takes_from_elsewhere(make: Make, model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The rows were made with another template than lies beside the tokenizer now."""
    subject = sampled(make(model))
    path = model / "chat_template.jinja"
    path.write_text(path.read_text().replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n"))
    status, detail = served.prompts(subject)
    assert status == "fail"
    assert "the prompt of conversation c1 (a.jsonl) is not the one that vLLM sends: " in detail
    assert "the rows have '', vLLM '<think>\\n'" in detail
    lines = [line[9:] for line in capfd.readouterr().err.splitlines() if line[9:].startswith(("-", "+"))]
    assert lines == ["--- the rows: conversation c1 (a.jsonl)", "+++ vLLM: conversation c1 (a.jsonl)", "+<think>\\n"]


@pytest.mark.parametrize(
    ("more", "named"), [({}, "conversation c1 (a.jsonl)"), ({"where": "f/a.jsonl, line 3"}, "f/a.jsonl, line 3")]
)
def test_rows_that_begin_otherwise_than_they_would_now(make: Make, more: dict[str, str], named: str) -> None:
    subject = sampled(make(), **more)
    [identity] = pd.read_parquet(subject.rows).row_id
    table = pd.read_parquet(subject.rows)
    # Another token in the place of the first: the row was made with another template, or on another day.
    table["input_ids"] = [[7, *row[1:]] for row in table["input_ids"]]
    table.to_parquet(subject.rows)
    status, detail = served.prompts(subject)
    assert status == "fail"
    assert f"the row of {named} does not begin as it would be rendered now" in detail
    assert "tokenize.template_args, else run the stage tokenize again" in detail
    assert identity


def test_a_row_that_cuts_the_same_text_into_other_tokens(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = sampled(make())
    table = pd.read_parquet(subject.rows)
    table["input_ids"] = [[7, *row[1:]] for row in table["input_ids"]]
    table.to_parquet(subject.rows)
    monkeypatch.setattr(subject.chat, "decode", lambda ids: "the same")
    status, detail = served.prompts(subject)
    assert (status, detail[-68:]) == (
        "warn",
        "vLLM sends, byte for byte, but 1 rows cut the text of earlier answers into other tokens"[-68:],
    )


def test_gpt_oss_without_its_vocabulary(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM builds its prompts by a library that fetches a vocabulary from the web."""
    from draftsmith.chat import vllm_chat

    def refused(*given: Any) -> None:
        raise vllm_chat.Refused("error downloading or loading vocab file")

    monkeypatch.setattr(vllm_chat.ServedChat, "prompt", refused)
    monkeypatch.setattr(vllm_chat.ServedChat, "by_harmony", True)
    status, detail = served.prompts(sampled(make()))
    assert status == "warn"
    assert detail.endswith("openai-harmony, which does not run here: error downloading or loading vocab file")
    monkeypatch.setattr(vllm_chat.ServedChat, "by_harmony", False)
    assert served.prompts(sampled(make()))[1].startswith(
        "vLLM refuses the prompt of conversation c1 (a.jsonl): error down"
    )


def test_an_engine_that_is_refused_is_told_elsewhere(make: Make, model: Path) -> None:
    change_config(model, model_type="none_such", architectures=["NoneSuch"])
    with pytest.raises(Skip, match="the check 'engine arguments' did not pass"):
        served.prompts(make(model))
