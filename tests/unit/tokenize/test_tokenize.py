"""tokenize: rows, splits, prompts and reason codes, from files to files."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import chats
from draftsmith import tokenize
from draftsmith.errors import DraftsmithError
from draftsmith.tokenize import make_rows, row_pool, spool
from tokenize_bench import Bench, conversation, many

WORDS = ["The answer is", "what is it", "hello hello", "system model user", "it is the answer"]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_rows_and_report(bench: Bench) -> None:
    report = bench.run(
        [
            conversation("hi", "The answer", "what?", "It is 3.", id="a", domain="chat"),
            conversation("hi", "hello", id="b"),
        ]
    )
    rows = bench.rows
    assert list(rows.columns) == [
        "row_id", "conversation_id", "source", "domain", "split", "input_ids", "span_starts", "span_ends", "length", "supervised", "repeats", "cut",
    ]  # fmt: skip
    assert list(rows.conversation_id) == ["a", "b"]
    assert list(rows.domain) == ["chat", "data"]
    assert list(rows.split) == ["train", "train"]
    assert bench.supervised(rows.iloc[0]) == ["The answer<|im_end|>", "It is 3.<|im_end|>"]
    for row in rows.itertuples():
        assert row.input_ids.dtype == np.int32
        assert row.row_id == hashlib.sha256(np.asarray(row.input_ids, "<i4").tobytes()).hexdigest()[:32]
        assert row.length == len(row.input_ids) == row.span_ends[-1]
        assert row.supervised == sum(row.span_ends - row.span_starts)
    assert report["conversations"] == report["rows"] == 2
    assert report["by_split"] == {"train": 2, "validation": 0, "evaluation": 0}
    assert report["by_domain"]["chat"] == {"train": 1, "validation": 0, "evaluation": 0}
    assert report["tokens"] == int(rows.length.sum())
    assert report["supervised"] == int(rows.supervised.sum())
    assert report["row_per"] == "conversation"
    assert report["mask_method"] == "prefix"
    assert report["template_sha256"] == hashlib.sha256(chats.CHATML.encode()).hexdigest()
    # Both tokens are in the template, and one ends the turn.
    assert report["special_ids_kept"] == [0, 1]
    assert sum(count for _, count in report["length_histogram"]) == 2


def test_histogram_and_kept_tokens_by_hand(tmp_path: Path) -> None:
    bench = Bench(tmp_path, vocab_size=300)
    report = bench.run([conversation("hi", "hello")])
    # 0 'user' \n 'hi'(2) 1 \n 0 'assistant' \n | 'hello' 1, with each word of the corpus one token.
    assert report["length_histogram"] == [[16, 1]]
    assert 8 < report["tokens"] <= 16


def test_an_edited_file_is_read_again(bench: Bench) -> None:
    bench.run([conversation("hi", "one")])
    before = list(bench.rows.row_id)
    bench.run([conversation("hi", "two")])
    assert list(bench.rows.row_id) != before
    assert bench.supervised(bench.rows.iloc[0]) == ["two<|im_end|>"]


def test_history_rewriting_templates_give_a_row_a_turn(tmp_path: Path) -> None:
    bench = Bench(tmp_path, chats.QWEN)
    thought = [
        {"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning_content": "t"},
        {"role": "user", "content": "r"}, {"role": "assistant", "content": "b"},
    ]  # fmt: skip
    report = bench.run([{"messages": thought}, conversation("hi", "one", "what?", "two")])
    assert report["row_per"] == "turn"
    assert report["conversations_by_turn"] == 1
    assert [bench.supervised(row) for row in bench.rows.itertuples()] == [
        ["<think>\nt\n</think>\n\na<|im_end|>"], ["b<|im_end|>"], ["one<|im_end|>", "two<|im_end|>"],
    ]  # fmt: skip


def test_long_rows_are_cut(bench: Bench) -> None:
    whole = conversation("hi", "x" * 40, "what?", "y" * 40)
    full = bench.run([whole])
    assert full["truncated"] == 0
    [start, second] = bench.rows.iloc[0].span_starts
    report = bench.run([whole, conversation("z" * 300, "a")], max_length=int(second) + 5)
    row = bench.rows.iloc[0]
    assert row.length == second + 5
    assert list(row.span_starts) == [start, second]
    assert list(row.span_ends)[-1] == second + 5
    assert report["truncated"] == 1
    assert report["dropped"] == {"too_long": 1}
    # A cut between the answers leaves the first.
    bench.run([whole], max_length=int(second) - 1)
    assert list(bench.rows.iloc[0].span_starts) == [start]
    # An answer that ends with the last place is whole.
    assert bench.run([whole], max_length=int(full["tokens"]))["truncated"] == 0


def test_short_rows_are_left_out(bench: Bench) -> None:
    rows = [conversation("hi", "a"), conversation("what", "a longer answer")]
    report = bench.run(rows, min_supervised_tokens=3)
    assert report["dropped"] == {"too_short": 1}
    assert bench.run(rows, min_supervised_tokens=2)["dropped"] == {}


def test_a_row_that_is_lost_beside_others_is_counted_apart(tmp_path: Path) -> None:
    bench = Bench(tmp_path, chats.MISTRAL, "mistral")
    system = {"role": "system", "content": "be"}
    given = conversation("hi", "a" * 30, "what?", "b")
    report = bench.run([{"messages": [system, *given["messages"]]}], min_supervised_tokens=10)
    assert report["dropped"] == {}
    assert report["dropped_rows"] == {"too_short": 1}


def test_duplicates_and_reasons(bench: Bench) -> None:
    rows = [
        conversation("hi", "hello"), conversation("hi", "hello", id="again"),
        {"messages": [{"role": "critic", "content": "x"}]}, conversation("hi"), conversation("q", ""),
    ]  # fmt: skip
    report = bench.run(rows)
    assert report["conversations"] == 5
    assert report["rows"] == 1
    assert report["dropped"] == {"duplicate": 1, "unknown_role": 1, "no_answer": 1, "empty_answer": 1}
    assert report["dropped_examples"]["duplicate"].endswith("data.jsonl, line 2")
    assert report["dropped_examples"]["unknown_role"].endswith("data.jsonl, line 3: 'critic'")
    with pytest.raises(
        DraftsmithError, match=r"3 of 5 conversations cannot be used, .*unknown_role 1 .*no_answer 1 .*empty_answer 1"
    ):
        bench.run(rows, dropped=0.5)
    # Duplicates are no fault of the data.
    bench.run(rows, dropped=0.6)


def test_every_reason_is_explained() -> None:
    from draftsmith import conversations
    from draftsmith.conversations import tokenised
    from draftsmith.tokenize import evaluation_prompts, lengths, masking

    modules = (conversations, tokenised, masking, lengths, make_rows, evaluation_prompts, tokenize)
    known = [set(module.REASONS) for module in modules]
    assert len(set().union(*known)) == sum(map(len, known))


def test_split(bench: Bench) -> None:
    rows = many(60, domain="x") + [conversation(f"say {n}", "no", domain="y") for n in range(9)]
    report = bench.run(rows, evaluation_per_domain=5, validation_fraction=0.2, seed=1)
    assert report["by_domain"]["x"]["evaluation"] == 5
    assert report["by_domain"]["y"]["evaluation"] == 3
    by_split = report["by_split"]
    assert by_split["train"] + by_split["validation"] + by_split["evaluation"] == 69
    assert 3 <= by_split["validation"] <= 22
    trained = set(bench.rows.conversation_id)
    asked = {prompt["conversation_id"] for prompt in bench.prompts}
    assert not trained & asked
    # The same again, and in another order.
    first = bench.rows.set_index("conversation_id").split.to_dict()
    bench.run(rows[::-1], evaluation_per_domain=5, validation_fraction=0.2, seed=1)
    assert {
        key: split for key, split in bench.rows.set_index("conversation_id").split.items() if key.startswith("c")
    } == {key: split for key, split in first.items() if key.startswith("c")}
    # More rows leave validation as it is.
    bench.run(many(90, domain="x"), validation_fraction=0.2, seed=1)
    larger = bench.rows.set_index("conversation_id").split.to_dict()
    bench.run(many(60, domain="x"), validation_fraction=0.2, seed=1)
    assert all(larger[key] == split for key, split in bench.rows.set_index("conversation_id").split.items())


def test_small_data_still_validates(bench: Bench) -> None:
    assert bench.run(many(2), validation_fraction=0.01)["by_split"] == {"train": 1, "validation": 1, "evaluation": 0}


def test_those_who_ask_the_same_stay_on_one_side(bench: Bench) -> None:
    rows = [conversation(f"what is {n % 20}", f"answer {n}", id=f"{n}") for n in range(60)]
    report = bench.run(rows, evaluation_per_domain=4, validation_fraction=0.3)
    sides = {int(row.conversation_id) % 20: set() for row in bench.rows.itertuples()}
    for row in bench.rows.itertuples():
        sides[int(row.conversation_id) % 20].add(row.split)
    assert all(len(side) == 1 for side in sides.values())
    assert not {int(prompt["conversation_id"]) % 20 for prompt in bench.prompts} & set(sides)
    assert len(bench.prompts) == 4
    assert report["dropped"] == {"evaluation_prompt": 8}


def test_explicit_splits(bench: Bench) -> None:
    rows = [
        *many(10, split="train"),
        conversation("v", "a", id="v", split="validation"), conversation("e", "a", id="e", split="test"),
        conversation("f", id="f", split="evaluation"), conversation("v", "b", id="w", split="train"),
    ]  # fmt: skip
    report = bench.run(rows, evaluation_per_domain=5, validation_fraction=0.5)
    assert report["by_split"] == {"train": 10, "validation": 1, "evaluation": 2}
    assert {prompt["conversation_id"] for prompt in bench.prompts} == {"e", "f"}
    assert report["dropped"] == {"split_conflict": 1}
    assert bench.rows.set_index("conversation_id").split["v"] == "validation"


def test_prompts(bench: Bench) -> None:
    rows = [
        *many(9),
        conversation("hi", "one", "what?", "two", id="e", split="evaluation"),
        conversation("z" * 600, "a", id="l", split="evaluation"),
    ]
    report = bench.run(rows)
    assert report["dropped"] == {"prompt_too_long": 1}
    [prompt] = bench.prompts
    assert prompt["messages"] == rows[9]["messages"][:3]
    text = bench.tokenizer.apply_chat_template(prompt["messages"], tokenize=False, add_generation_prompt=True)
    assert prompt["prompt_token_ids"] == bench.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert bench.tokenizer.decode(prompt["prompt_token_ids"]).endswith("<|im_start|>assistant\n")


def test_nothing_is_supervised(bench: Bench) -> None:
    with pytest.raises(
        DraftsmithError, match=r"no token of 2 conversations .* \(left out: no_answer 2\).*regenerate\.enabled"
    ):
        bench.run([conversation("hi"), conversation("you")])


def test_everything_is_supervised(tmp_path: Path) -> None:
    # The block that is to tell answers apart is around everything, and no header is left to be learnt.
    bench = Bench(tmp_path, "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}")
    with pytest.raises(DraftsmithError, match=r"every token of 1 conversations is supervised"):
        bench.run([conversation("hi", "one")], mask="generation_tags")


def test_no_row_is_left_to_train_on(bench: Bench) -> None:
    with pytest.raises(DraftsmithError, match="none of 1 conversations is left to train on"):
        bench.run([conversation("hi", "one", split="validation")])
    assert not (bench.folder / "out" / "rows.parquet").exists()


def test_rows_must_fit_the_targets_context(tmp_path: Path) -> None:
    bench = Bench(tmp_path, max_positions=64)
    with pytest.raises(
        DraftsmithError,
        match=r"the longest row has \d+ tokens, but the target's context is 64; set tokenize\.max_length to 62 or less",
    ):
        bench.run([conversation("hi", "x" * 100)])
    bench.run([conversation("hi", "x" * 100)], max_length=62)


def test_tokens_outside_of_the_models_vocabulary(tmp_path: Path) -> None:
    bench = Bench(tmp_path, vocab_size=len(chats.fast(chats.CHATML)))
    bench.tokenizer.add_tokens(["extra"])
    bench.tokenizer.save_pretrained(tmp_path / "model")
    rows = [conversation("hi", "The answer"), conversation("hi", "some extra")]
    assert bench.run(rows)["dropped"] == {"token_out_of_range": 1}
    assert len(bench.rows) == 1


def test_regenerated_conversations(bench: Bench) -> None:
    ids = bench.tokenizer("The", add_special_tokens=False)["input_ids"]
    row = conversation(
        "hi", "The", id="r", generated={"fingerprint": "mine", "finish_reasons": ["length"], "token_ids": [ids]}
    )
    row["messages"][1]["truncated"] = True
    report = bench.run([row], regenerated=True)
    assert bench.supervised(bench.rows.iloc[0]) == ["The"]
    assert report["row_per"] == "conversation"


def test_several_processes_make_the_same(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = many(150)
    bench.run(rows)
    alone = bench.rows
    monkeypatch.setattr(row_pool, "_POOL_FROM", 100)
    monkeypatch.setattr(row_pool, "_BY_THREAD_UP_TO", 0)
    monkeypatch.setattr(row_pool.hardware, "cores", lambda: [0, 1])
    # Spawned ones would import transformers for ten seconds.
    monkeypatch.setattr(row_pool, "_START", "fork")
    bench.run(rows)
    pd.testing.assert_frame_equal(bench.rows, alone)


def test_row_groups_are_small(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.parquet as pq

    monkeypatch.setattr(spool, "GROUP_ROWS", 10)
    bench.run(many(35))
    assert pq.ParquetFile(bench.folder / "out" / "rows.parquet").num_row_groups == 4
    assert len(bench.rows) == 35


def test_the_mend_is_that_of_the_commonest_reason(bench: Bench) -> None:
    with pytest.raises(DraftsmithError, match=r"left out: too_short 2\); lower tokenize\.min_tokens"):
        bench.run([conversation("hi", "one"), conversation("you", "two")], min_supervised_tokens=50)


def test_headers_that_swallow_the_beginning_of_answers_are_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The header ends in a space, which the tokenizer joins with the first word behind it."""
    header = "[A] "
    template = (
        "{% for m in messages %}{{ '[Q] ' if m.role == 'user' else '"
        + header
        + "' }}{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}" + header + "{% endif %}"
    )
    bench = Bench(tmp_path, template)
    bench.run(
        [conversation("hi", "answer is it"), conversation("you", "is it the answer"), conversation("us", "answer")]
    )
    assert "warning: in 3 of 3 answers the first characters share a token with the header" in capfd.readouterr().err
