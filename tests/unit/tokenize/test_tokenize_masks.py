"""tokenize: tokens saved, sources of which nothing or everything is supervised, and the sample for the comparison with vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_tokenize import Bench, conversation

import chats
from draftsmith import tokenize
from draftsmith.chat import Chat
from draftsmith.config import parse
from draftsmith.conversations import Conversation
from draftsmith.errors import DraftsmithError
from draftsmith.tokenize.lengths import TokenRow
from draftsmith.tokenize.mask_extremes import MaskExtremes
from draftsmith.tokenize.served_sample import COUNT, ServedSample


def test_tokens_saved_are_those_of_a_row_for_each_answer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    texts = ("hi", "The answer", "what?", "It is 3.", "and?", "Yes.")
    bench = Bench(tmp_path)
    whole = bench.run([conversation(*texts), conversation("hi", "hello")])
    log = capfd.readouterr().err
    # The same answers one by one, each with all that came before it.
    turns = [bench.run([conversation(*texts[:end])])["tokens"] for end in (2, 4, 6)]
    assert whole["tokens_saved"] == sum(turns) - turns[-1]
    assert f"{whole['tokens_saved']} saved against a row for each answer" in log
    # What is kept for evaluation is not counted.
    kept = bench.run([conversation(*texts, split="evaluation"), conversation("hi", "hello")])
    assert kept["tokens_saved"] == 0


def test_rows_by_turn_save_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, chats.QWEN)
    thought = [
        {"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning_content": "t"},
        {"role": "user", "content": "r"}, {"role": "assistant", "content": "b"},
    ]  # fmt: skip
    report = bench.run([{"messages": thought}])
    assert (report["row_per"], report["rows"], report["tokens_saved"]) == ("turn", 2, 0)


def run(bench: Bench, *sources: list[dict[str, Any]], template_args: dict[str, Any] | None = None) -> dict[str, Any]:
    """The stage with several sources, s0.jsonl, s1.jsonl, …; half of the conversations may be dropped."""
    paths = []
    for number, rows in enumerate(sources):
        paths.append(bench.folder / f"s{number}.jsonl")
        paths[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "data": {"sources": [{"path": str(path)} for path in paths], "max_dropped_fraction": 0.9},
        "tokenize": {
            "min_supervised_tokens": 1, "evaluation_per_domain": 0, "validation_fraction": 0.0,
            "template_args": template_args or {},
        },
    }  # fmt: skip
    out = bench.folder / "out"
    tokenize.run(
        parse(values, "test"), target=bench.folder / "target.json", conversations=None, rows=out / "rows.parquet",
        prompts=out / "prompts.jsonl", report=out / "tokenize.json",
    )  # fmt: skip
    return dict(json.loads((out / "tokenize.json").read_text()))


GOOD = [conversation("hi", f"The answer {number}") for number in range(5)]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        # Roles that nobody knows, no answers, and rows whose mask has nothing out or nothing in.
        (
            [{"messages": [{"role": "user", "content": "q"}, {"role": "bot9", "content": "a"}]}] * 2,
            r"s1\.jsonl: none of its 2 conversations can be learnt from: unknown_role 2 \(first: .*s1\.jsonl, line 1\); .*"
            r"take data\.sources\[1\] out",
        ),
        (
            [conversation("what", id="x1"), conversation("is", id="x2")],
            r"s1\.jsonl: none of its 2 conversations can be learnt from: no_answer 2 \(first: .*s1\.jsonl, line 1\)",
        ),
        (
            [{"input_ids": [5, 6, 7], "loss_mask": [1, 1, 1], "id": "x3"}],
            r"s1\.jsonl: none of its 1 conversations can be learnt from: mask_all_one 1 \(first: .*s1\.jsonl, line 1\); mend its roles, its masks",
        ),
    ],
)  # fmt: skip
def test_a_source_of_nothing_or_everything_is_named(tmp_path: Path, bad: list[dict[str, Any]], said: str) -> None:
    """In a mixture that is fine as a whole."""
    with pytest.raises(DraftsmithError, match=said):
        run(Bench(tmp_path), GOOD, bad)


def test_a_source_that_only_asks_or_repeats_is_no_fault(tmp_path: Path) -> None:
    asking = [conversation("what", split="evaluation")]
    report = run(Bench(tmp_path), GOOD, asking, GOOD[:1])
    assert report["by_split"] == {"train": 5, "validation": 0, "evaluation": 1}
    assert report["dropped"] == {"duplicate": 1}


def test_a_template_that_forgets_the_prompt_for_one_source(tmp_path: Path) -> None:
    """It writes a short conversation's answer alone."""
    template = chats.CHATML.replace(
        "{% for m in messages %}", "{% for m in messages if messages[0].content != 'x' or m.role == 'assistant' %}"
    ).replace("{% if add_generation_prompt %}", "{% if add_generation_prompt and messages[0].content != 'x' %}")
    template = template.replace(
        "<|im_start|>{{ m.role }}\n", "{% if messages[0].content != 'x' %}<|im_start|>{{ m.role }}\n{% endif %}"
    )
    bench = Bench(tmp_path, template)
    with pytest.raises(
        DraftsmithError, match=r"s1\.jsonl: every token of its 2 rows is supervised.*\(first: .*s1\.jsonl, line 1\)"
    ):
        run(bench, GOOD, [conversation("x", "The", id="n1"), conversation("x", "answer", id="n2")])
    report = run(bench, [*GOOD, conversation("x", "The", id="n1")])
    assert report["whole_rows_supervised"] == 1


def test_warnings(capfd: pytest.CaptureFixture[str]) -> None:
    extremes = MaskExtremes()
    extremes.add(0, "chat", "c1", 10, 4)
    extremes.add(0, "chat", "c2", 5, 5)
    extremes.add(0, "code", "c3", 5, 5)
    extremes.lose(0, "math", "c4", "not_aligned")
    extremes.lose(0, None, "line 9", "bad_message")
    extremes.check(["a.jsonl"])
    assert [line[9:] for line in capfd.readouterr().err.splitlines()] == [
        "tokenize: warning: every token of the domain code is supervised (first: c3)",
        "tokenize: warning: nothing of the domain math is supervised: not_aligned 1 (first: c4)",
        "tokenize: warning: 2 of 3 rows of a.jsonl are supervised as a whole, without a prompt (first: c2)",
    ]
    assert extremes.whole_rows == 2


def test_the_sample(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    many = [conversation("hi", f"The answer {number}", id=f"m{number}") for number in range(40)]
    rare = [
        conversation("hi", "a", "what", "b", id="long"),
        conversation("hi", "a", id="tools", tools=tools),
        {"messages": [{"role": "system", "content": "be"}, *conversation("q", "a")["messages"]], "id": "system"},
    ]
    bench = Bench(tmp_path)
    sample = run(bench, many + rare, [conversation("hi", "other", id="other")])["served_sample"]
    # The first eight of a kind, both sources in turn, and first what is out of the ordinary.
    names = [one["conversation_id"] for one in sample]
    assert names[1] == "other"
    assert {*names[:1], *names[2:4]} == {"long", "tools", "system"}
    assert names[4:] == [f"m{number}" for number in range(8)]
    rows = bench.rows.set_index("row_id")
    chat = Chat(bench.tokenizer, {})
    for one in sample:
        begin = rows.loc[one["row_id"]].input_ids[: one["prompt_tokens"]]
        assert chat.decode(begin) == chat.render(one["messages"], one.get("tools"), prompt=True)
        assert one["messages"][-1]["role"] == "user"
    assert next(one for one in sample if one["conversation_id"] == "tools")["tools"] == tools


def test_the_sample_of_cut_rows_and_of_many_kinds() -> None:
    sample = ServedSample()
    messages = conversation("hi", "a", "what", "b")["messages"]
    # Of two answers the row was cut behind the first.
    sample.add(Conversation("cut", "s", "d", messages), [TokenRow([1, 2, 3, 4], [(2, 4)], True)], ["r1"])
    assert sample.chosen() == [
        {
            "conversation_id": "cut",
            "source": "s",
            "where": "",
            "messages": messages[:1],
            "row_id": "r1",
            "prompt_tokens": 2,
        }
    ]
    # One of two rows was left out, and nobody knows which.
    two = ServedSample()
    three = conversation("hi", "a", "what", "b", "and", "c")["messages"]
    rows = [TokenRow([1, 2], [(1, 2)], False), TokenRow([1, 2, 3], [(2, 3)], False)]
    two.add(Conversation("lost", "s", "d", three), rows, ["r1", "r2"])
    assert two.chosen() == [{"conversation_id": "lost", "source": "s", "where": "", "messages": three[:5]}]
    for number in range(1000):
        sample.add(Conversation(str(number), f"s{number}", "d", messages), [TokenRow([1, 2], [(1, 2)], False)], ["r"])
    assert len(sample.chosen()) == COUNT
    # One that is very long is passed over.
    sample = ServedSample()
    sample.add(Conversation("c", "s", "d", conversation("hi " * 9000, "a")["messages"]), [rows[0]], ["r"])
    assert sample.chosen() == []
