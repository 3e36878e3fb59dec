"""tokenize: weights, rows given as tokens, near duplicates, lengths and figures, from files to files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chats
from draftsmith import tokenize
from draftsmith.errors import DraftsmithError
from draftsmith.report.sections import left_out
from tokenize_bench import Bench, conversation, many

WORDS = ["The answer is", "what is it", "hello hello", "system model user", "it is the answer"]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def tokens(ids: list[int], mask: list[int], **more: Any) -> dict[str, Any]:
    return {"input_ids": ids, "loss_mask": mask, **more}


# ---- rows given as tokens ----


def test_given_tokens_never_pass_the_template(bench: Bench) -> None:
    given = [10, 11, 12, 13, 14, 15, 16]
    report = bench.run([tokens(given, [0, 0, 1, 1, 0, 1, 0], id="t", domain="x"), conversation("hi", "hello", id="m")])
    row = bench.rows.set_index("conversation_id").loc["t"]
    # Only what follows the last answer is cut.
    assert list(row.input_ids) == given[:6]
    assert (list(row.span_starts), list(row.span_ends)) == ([2, 5], [4, 6])
    assert (row.supervised, row.domain) == (3, "x")
    assert report["mask_method"] == "prefix"
    assert report["rows"] == 2


def test_tokens_alone_need_no_way_to_find_answers(bench: Bench) -> None:
    report = bench.run([tokens([10, 11, 12, 13], [0, 0, 1, 1])])
    assert report["mask_method"] == "given"
    assert report["special_ids_kept"] == [0, 1]
    # A special token that is supervised stays in the draft's vocabulary, though no template wrote it.
    bench.tokenizer.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    bench.tokenizer.save_pretrained(bench.folder / "model")
    special = bench.tokenizer.convert_tokens_to_ids("<|tool|>")
    assert special not in bench.run([tokens([special, 11, 12, 13], [0, 0, 1, 1])])["special_ids_kept"]
    assert special in bench.run([tokens([10, 11, special, 13], [0, 0, 1, 1])])["special_ids_kept"]


def test_given_tokens_are_cut_and_counted_like_others(bench: Bench) -> None:
    rows = [
        tokens(list(range(20)), [0] * 4 + [1] * 4 + [0] * 4 + [1] * 8, id="long"), tokens([1, 2, 3, 4], [0, 0, 0, 1], id="short"),
        tokens([5, 6, 320, 7], [0, 0, 1, 1], id="unknown"), tokens([5, 6, 7, 320], [0, 0, 1, 0], id="behind"),
        tokens([5, 6], [0, 0]), tokens([5, 6], [1, 1]), tokens([5, 6], [0, 1, 1]), tokens([5, 6], [0, 3]), tokens([5, -1], [0, 1]),
        tokens([5, 6, 8, 9], [0, 0, 1, 1], id="first"), tokens([5, 6, 8, 9], [0, 0, 1, 1], id="again"),
        tokens([5, 6, 8, 9], [0, 1, 1, 1], id="otherwise"),
    ]  # fmt: skip
    report = bench.run(rows, max_length=14, min_supervised_tokens=1, min_tokens=3)
    assert report["dropped"] == {
        "token_out_of_range": 1, "mask_all_zero": 1, "mask_all_one": 1, "mask_length": 1, "bad_loss_mask": 1, "bad_input_ids": 1,
        "duplicate": 2,
    }  # fmt: skip
    assert report["dropped_examples"]["token_out_of_range"].endswith("data.jsonl, line 3: 320 of 320")
    assert report["dropped_examples"]["mask_length"].endswith("line 7: 2 ids and a mask of 3")
    found = bench.rows.set_index("conversation_id")
    assert set(found.index) == {"long", "short", "behind", "first"}
    assert list(found.span_ends["long"]) == [8, 14]
    assert found.length["behind"] == 3
    assert report["truncated"] == 1


def test_given_tokens_can_be_asked_and_stay_together(bench: Bench) -> None:
    """What comes before the last answer is what a server would be sent."""
    rows = [
        *many(9), tokens([10, 11, 12, 13, 14, 15], [0, 0, 1, 0, 1, 1], id="e", split="evaluation"),
        tokens([10, 11, 77, 13, 88], [0, 0, 1, 0, 1], id="same question"), tokens([20, 21], [0, 1], id="t"),
    ]  # fmt: skip
    report = bench.run(rows)
    [prompt] = bench.prompts
    assert prompt["conversation_id"] == "e"
    assert prompt["prompt_token_ids"] == [10, 11, 12, 13]
    assert "messages" not in prompt
    assert report["dropped"] == {"evaluation_prompt": 1}
    assert "same question" not in set(bench.rows.conversation_id)


def test_nothing_is_asked(bench: Bench) -> None:
    report = bench.run([*many(3), tokens([10, 11, 12], [1, 0, 0], id="e", split="evaluation")])
    assert report["dropped"] == {"mask_all_one": 1}


def test_messages_behind_many_rows_of_tokens(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way to find answers is chosen by messages, wherever the first of them are."""
    monkeypatch.setattr(tokenize, "_HEAD", 5)
    report = bench.run([*(tokens([10, 11, n], [0, 0, 1]) for n in range(20, 28)), *many(3)])
    assert report["mask_method"] == "prefix"
    assert [bench.supervised(row) for row in bench.rows.itertuples()][-1] == ["The answer is 2<|im_end|>"]


# ---- sources and weights ----


def test_every_source_is_in_the_report(bench: Bench) -> None:
    first, second = bench.folder / "a.jsonl", bench.folder / "b.jsonl"
    first.write_text("".join(json.dumps(row) + "\n" for row in [*many(40), {"messages": [{"role": "x"}]}]))
    second.write_text("".join(json.dumps(conversation(f"say {n}", "it", id=f"b{n}")) + "\n" for n in range(10)))
    sources = [{"path": str(first), "weight": 0.5}, {"path": str(second), "weight": 2, "domain": "b"}]
    report = bench.run([], sources=sources, evaluation_per_domain=2, validation_fraction=0.2)
    one, two = report["sources"]
    assert (one["path"], one["revision"], one["weight"], one["read"]) == (str(first), None, 0.5, 41)
    assert one["kept"] + one["not_sampled"] + one["unusable"] == 41
    assert 10 <= one["kept"] <= 30
    assert {name: two[name] for name in ("weight", "read", "not_sampled", "unusable", "kept")} == {
        "weight": 2.0, "read": 10, "not_sampled": 0, "unusable": 0, "kept": 10,
    }  # fmt: skip
    rows = bench.rows
    assert one["rows"] + two["rows"] == len(rows)
    assert two["tokens"] == int(rows[rows.domain == "b"].length.sum())
    assert report["dropped"]["not_sampled"] == one["not_sampled"]
    # Only training takes a row more than once.
    assert set(rows[(rows.domain == "b") & (rows.split == "train")].repeats) == {2}
    assert set(rows[rows.split == "validation"].repeats) == {1}
    assert set(rows[rows.domain == "a"].repeats) == {1}
    taken = rows[rows.split == "train"]
    assert report["packing"]["rows_per_pass"] == int(taken.repeats.sum())
    assert report["packing"]["tokens_per_pass"] == int((taken.repeats * taken.length).sum())


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_what_was_read_of_a_source_is_the_sum_of_what_became_of_it(bench: Bench) -> None:
    """By hand, also where conversations of two sources ask the same; and so the table on the page."""
    first = [
        conversation("hi", "A"), conversation("hi", "A"), conversation("q", ""), {"messages": [{"role": "x"}]},
        conversation("what", "A", split="evaluation"), conversation("what", "B"),
        conversation("is", "A", split="train"), conversation("is", "B", split="validation"),
    ]  # fmt: skip
    second = [conversation("what", "C"), conversation("hi", "A"), conversation("it", "A"), conversation("what", "D")]
    found = {"a": first, "b": second, "c": many(40), "d": lots()}
    sources = [{"path": str(lines(bench.folder / f"{name}.jsonl", rows))} for name, rows in found.items()]
    sources[2]["weight"] = 0.25
    report = bench.run([], sources=sources, near_duplicates=0.8, max_length=2048)
    names = ("read", "kept", "unusable", "duplicates", "same_prompt", "not_sampled")
    counts = [[source[name] for name in names] for source in report["sources"]]
    assert counts[0] == [8, 3, 2, 1, 2, 0]
    assert counts[1] == [4, 1, 0, 1, 2, 0]
    kept = counts[2][1]
    assert 3 <= kept <= 25
    assert counts[2] == [40, kept, 0, 0, 0, 40 - kept]
    assert counts[3] == [13, 7, 0, 6, 0, 0]
    assert sum(report["dropped"].values()) == sum(sum(found[2:]) for found in counts)
    table = left_out.sources(report)
    assert table is not None
    assert list(table.head[3:9]) == ["Read", "Kept", "Unusable", "Duplicates", "Same prompt", "Not sampled"]
    assert [[int(str(cell)) for cell in row[3:9]] for row in table.rows] == counts


@pytest.mark.parametrize("order", [1, -1])
def test_prompts_that_are_left_out_are_no_loss_to_the_sum(bench: Bench, order: int) -> None:
    """One is too long to be asked, and of another the one that was to be asked is a near duplicate of its like."""
    long = conversation("x" * 600, "A", split="evaluation")
    alike = [conversation("tell me", f"{sentence(1)} {n}", split="evaluation") for n in range(2)]
    report = bench.run([*many(3), long, *alike[::order], *alike], near_duplicates=0.8)
    [source] = report["sources"]
    parts = ("kept", "unusable", "duplicates", "same_prompt", "not_sampled")
    assert source["read"] == 8 == sum(source[name] for name in parts)
    assert source["duplicates"] == 3
    assert report["dropped"]["near_duplicate"] == 1


def test_a_row_of_a_folder_is_told_by_its_file_and_line(bench: Bench) -> None:
    """Whatever it was left out for, in the same words."""
    folder = bench.folder / "odd" / "f"
    lines(folder / "a.jsonl", [conversation("hi", "A")])
    lines(folder / "b.jsonl", [conversation("q", "")])
    lines(folder / "c.jsonl", [conversation("hi", "A"), {"messages": [{"role": "x"}]}])
    lines(folder / "d.jsonl", [conversation("what", "A", id="mine", split="evaluation"), conversation("what", "B")])
    source = [{"path": str(folder)}]
    report = bench.run([], sources=source)
    assert report["dropped_examples"] == {
        "empty_answer": f"{folder}/b.jsonl, line 1: message 2", "duplicate": f"{folder}/c.jsonl, line 1",
        "unknown_role": f"{folder}/c.jsonl, line 2: 'x'", "evaluation_prompt": f"asking as {folder}/d.jsonl, line 1",
    }  # fmt: skip
    assert list(bench.rows.conversation_id) == [f"{folder}/a.jsonl:1"]
    assert report["served_sample"][0]["where"] == f"{folder}/a.jsonl, line 1"


def test_what_a_conversation_is_called_has_no_say_in_its_split(bench: Bench) -> None:
    """In one file, in a folder of three, or with ids: the same rows and prompts of each split."""
    rows = [conversation(f"what is {n}", f"The answer is {n}", domain="d") for n in range(30)]
    settings: dict[str, Any] = {"evaluation_per_domain": 4, "validation_fraction": 0.3}
    for place in range(3):
        lines(bench.folder / "three" / f"{place}.jsonl", rows[10 * place : 10 * place + 10])
    seen = []
    for given in (
        lines(bench.folder / "one.jsonl", rows), bench.folder / "three",
        lines(bench.folder / "named.jsonl", [row | {"id": f"i{place}"} for place, row in enumerate(rows)]),
    ):  # fmt: skip
        bench.run([], sources=[{"path": str(given)}], **settings)
        splits = dict(zip(bench.rows.row_id, bench.rows.split, strict=True))
        seen.append((splits, [prompt["prompt_id"] for prompt in bench.prompts]))
    assert set(seen[0][0].values()) == {"train", "validation"}
    assert len(seen[0][1]) == 4
    assert seen[0] == seen[1] == seen[2]


def test_a_weight_changes_no_row(bench: Bench) -> None:
    """Rows have the same content hash, so that no state is computed again."""
    bench.run([], sources=[{"path": str(written(bench, many(20)))}])
    once = bench.rows
    bench.run([], sources=[{"path": str(bench.data), "weight": 3}])
    assert list(bench.rows.row_id) == list(once.row_id)
    assert set(bench.rows.repeats) == {3}
    bench.run([], sources=[{"path": str(bench.data), "weight": 0.5}])
    assert set(bench.rows.row_id) < set(once.row_id)


def written(bench: Bench, rows: list[dict[str, Any]]) -> Path:
    bench.data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return bench.data


def test_what_a_regeneration_noted_is_how_often_a_row_is_taken(bench: Bench) -> None:
    row = conversation("hi", "The", id="r", generated={"fingerprint": "other", "repeats": 3})
    bench.run([row], regenerated=True)
    assert list(bench.rows.repeats) == [3]


def test_an_edited_answer_is_learnt_as_it_was_edited(bench: Bench) -> None:
    """The ids that the target wrote are those of its own text alone."""
    ids = bench.tokenizer("The<|im_end|>", add_special_tokens=False)["input_ids"]
    given = chats.talk("hi", "The", name="r", generated={"fingerprint": "mine", "token_ids": [ids]}).as_row()
    bench.run([given], regenerated=True)
    before = bench.rows.row_id[0]
    given["messages"][1]["content"] = "The answer"
    bench.run([given], regenerated=True)
    assert bench.supervised(bench.rows.iloc[0]) == ["The answer<|im_end|>"]
    assert bench.rows.row_id[0] != before


def test_a_malformed_line_is_counted_and_too_many_fail(bench: Bench) -> None:
    text = "".join(json.dumps(row) + "\n" for row in many(4))
    bench.data.write_text(text + '{"messages": [\n')
    source = [{"path": str(bench.data)}]
    report = bench.run([], sources=source, dropped=0.2)
    assert report["dropped"] == {"malformed_line": 1}
    assert report["dropped_examples"]["malformed_line"].endswith(
        "data.jsonl, line 5: not valid JSON (Expecting value at column 15)"
    )
    bench.data.write_text(text + '{"messages": [\n' * 2)
    with pytest.raises(
        DraftsmithError,
        match=r"2 of 6 conversations cannot be used, .*malformed_line 2 \(first: .*data\.jsonl, line 5: ",
    ):
        bench.run([], sources=source, dropped=0.2)


def test_unknown_roles_are_never_supervised(bench: Bench) -> None:
    """The whole conversation goes; nothing of it is learnt in any other role either."""
    rows = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "critic", "content": "no"}, {"role": "assistant", "content": "a"}]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "narrator", "value": "no"}]},
        conversation("hi", "hello"),
    ]  # fmt: skip
    report = bench.run(rows)
    assert report["dropped"] == {"unknown_role": 2}
    assert [bench.supervised(row) for row in bench.rows.itertuples()] == [["hello<|im_end|>"]]


# ---- near duplicates ----


def sentence(seed: int) -> str:
    return " ".join(random.Random(seed).choices([f"w{number}" for number in range(500)], k=80))


def lots() -> list[dict[str, Any]]:
    """Two lots of four that are nearly the same, and five of their own."""
    similar = [
        conversation(f"{sentence(lot)} {n}", sentence(lot + 100), id=f"{lot}-{n}") for lot in (1, 2) for n in range(4)
    ]
    return [*similar, *(conversation(sentence(n), sentence(n + 100), id=f"alone-{n}") for n in range(10, 15))]


def test_near_duplicates_are_left_out_whatever_the_order(bench: Bench) -> None:
    settings = {"near_duplicates": 0.8, "max_length": 2048}
    report = bench.run(lots(), dropped=0.0, **settings)
    kept = set(bench.rows.conversation_id)
    assert report["dropped"] == {"near_duplicate": 6}
    assert sum(name.startswith("1-") for name in kept) == sum(name.startswith("2-") for name in kept) == 1
    assert len(kept) == 7
    example = report["dropped_examples"]["near_duplicate"]
    given = [row["id"] for row in lots()]
    out = given[int(example.split(": ")[0].removeprefix(f"{bench.data}, line ")) - 1]
    [like] = [name for name in kept if name.startswith(out[:2])]
    assert out not in kept
    assert example.endswith(f" of {bench.data}, line {given.index(like) + 1}")
    assert 0.8 <= float(example.split(": ")[1].split()[0]) <= 1
    assert report["sources"][0]["kept"] == 7
    bench.run(lots()[::-1], **settings)
    assert set(bench.rows.conversation_id) == kept
    # Off by default; and the threshold matters.
    assert bench.run(lots(), max_length=2048)["dropped"] == {}


def test_no_near_duplicate_of_a_prompt_trains(bench: Bench) -> None:
    rows = lots()
    rows[2]["split"] = "evaluation"
    report = bench.run(rows, near_duplicates=0.8, max_length=2048, evaluation_per_domain=2, validation_fraction=0.2)
    asked = {prompt["conversation_id"] for prompt in bench.prompts}
    trained = set(bench.rows.conversation_id)
    assert "1-2" in asked
    assert len(asked) == 2
    assert not any(name.startswith("1-") for name in trained)
    assert len(asked | trained) == 7
    assert report["by_split"]["evaluation"] == 2
    # One that was left out is not asked either, and leaves no prompt key behind.
    assert sum(name.startswith("2-") for name in asked | trained) == 1


# ---- lengths ----


def test_policies_of_truncation(bench: Bench) -> None:
    whole = conversation("hi", "x" * 40, "what?", "y" * 40)
    full = bench.run([whole])["tokens"]
    first = int(bench.rows.iloc[0].span_ends[0])
    report = bench.run([whole], max_length=full - 1, truncate="turn")
    assert (report["tokens"], report["truncated"]) == (first, 1)
    assert bench.supervised(bench.rows.iloc[0]) == ["x" * 40 + "<|im_end|>"]
    report = bench.run([whole, conversation("hi", "it")], max_length=full - 1, truncate="drop")
    assert report["dropped"] == {"over_max_length": 1}
    assert report["dropped_examples"]["over_max_length"].endswith(f"{full} tokens")
    with pytest.raises(DraftsmithError, match="over_max_length 1"):
        bench.run([whole, conversation("hi", "it")], dropped=0.4, max_length=full - 1, truncate="drop")


@pytest.mark.parametrize("truncate", ["cut", "turn"])
def test_rows_that_were_cut_are_counted_and_marked(
    bench: Bench, capfd: pytest.CaptureFixture[str], truncate: str
) -> None:
    rows = [conversation("hi", "x" * 10, "what?", "y" * 200), conversation("hi", "it"), conversation("is", "it")]
    bench.run(rows, max_length=60, truncate=truncate)
    assert list(bench.rows.cut) == [True, False, False]
    said = "3 conversations gave 3 rows (one a conversation, 1 of them cut at tokenize.max_length) of"
    assert said in capfd.readouterr().err


def test_filters_by_length_and_turns(bench: Bench) -> None:
    rows = [conversation("hi", "a", id="1"), conversation("hi", "a", "what", "b", id="2")]
    assert bench.run(rows, max_turns=1)["dropped"] == {"too_many_turns": 1}
    assert list(bench.rows.conversation_id) == ["1"]
    short = int(bench.rows.length.iloc[0])
    assert bench.run(rows, min_tokens=short)["dropped"] == {}
    assert bench.run(rows, min_tokens=short + 1)["dropped"] == {"too_few_tokens": 1}
    assert list(bench.rows.conversation_id) == ["2"]


# ---- packing ----


def test_packing_by_hand(bench: Bench) -> None:
    """Rows of 500, 500, 24 and 600 tokens in packs of 1,024 make 2: 1,024 + 600, or another 2; in 2,048 one."""
    rows = [
        tokens([n + 10] * (length - 1) + [n], [0] * (length - 1) + [1]) for n, length in enumerate((500, 500, 24, 600))
    ]
    report = bench.run(rows, max_length=1000)
    packing = report["packing"]
    assert (packing["rows_per_pass"], packing["tokens_per_pass"]) == (4, 1624)
    assert packing["padding_if_padded"] == round(1 - 1624 / (4 * 600), 4)
    by_size = {entry["pack_tokens"]: entry for entry in packing["by_pack_tokens"]}
    assert by_size[1024] == {"pack_tokens": 1024, "packs": 2, "fill": round(1624 / 2048, 4)}
    assert by_size[2048] == {"pack_tokens": 2048, "packs": 1, "fill": round(1624 / 2048, 4)}
    assert list(by_size) == [1024, 2048, 4096, 8192, 16384, 32768, 65536]
    # No size is shown that the longest row does not fit into.
    long = tokens([n % 300 for n in range(1100)], [0] * 1099 + [1])
    packing = bench.run([*rows, long], max_length=2000)["packing"]
    assert packing["by_pack_tokens"][0]["pack_tokens"] == 2048


def test_figures_are_numbers(bench: Bench) -> None:
    """A single row that was cut counts as 1, not as true."""
    report = bench.run([conversation("hi", "x" * 300)], max_length=50)
    assert report["truncated"] == 1
    assert type(report["truncated"]) is int
    assert type(report["sources"][0]["kept"]) is int
    assert bench.rows.repeats.dtype == np.int32
