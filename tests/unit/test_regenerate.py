"""regenerate: the target's turns, what is kept and what is asked again. The engine is a stand-in that answers at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import chats
from draftsmith import regenerate, tokenize
from draftsmith.config import Config, parse
from draftsmith.errors import DraftsmithError
from draftsmith.regenerate.asking import Question, Reply
from regenerate_bench import Folder, echo, merge, row

END = 1


class Engine:
    """Stands for vLLM: ``reply`` gives the answer's text to a prompt's; None dies, and a text that ends in '…' is cut."""

    loads = 0
    asked: list[str]
    reply: Callable[[str], str | None]
    tokenizer: Any

    def __init__(self, config: Config, target: dict[str, Any], max_model_len: int, stops: Sequence[int]) -> None:
        self.waiting: list[Question] = []
        self.at_once = 2 * config.engine.max_num_seqs
        assert list(stops) == [END]

    def __enter__(self) -> Engine:
        Engine.loads += 1
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def ask(self, question: Question) -> None:
        self.waiting.append(question)

    def wait(self) -> list[Reply]:
        question = self.waiting.pop(0)
        text = Engine.tokenizer.decode(question.prompt)
        Engine.asked.append(text)
        reply = Engine.reply(text)
        if reply is None:
            raise RuntimeError("the engine died")
        if reply == "abort":
            return [Reply(question.name, "abort", [])]
        ids = Engine.tokenizer(reply.removesuffix("…"), add_special_tokens=False)["input_ids"]
        cut = reply.endswith("…") or len(ids) >= question.max_tokens
        ids = ids[: question.max_tokens] if cut else [*ids, END]
        return [Reply(question.name, "length" if cut else "stop", ids, tokens=len(ids))]

    def described(self) -> dict[str, Any]:
        return {"engine": "a stand-in"}


class Bench(Folder):
    def __init__(self, folder: Path, template: str) -> None:
        super().__init__(folder, template)
        Engine.tokenizer = self.tokenizer

    def config(self, dropped: float, **settings: Any) -> Config:
        return parse(
            {
                "data": {"sources": [{"path": str(self.folder / "data.jsonl")}], "max_dropped_fraction": dropped},
                "regenerate": {"enabled": True, "max_tokens": 64, **settings},
                "tokenize": {"max_length": 200, "min_supervised_tokens": 1},
                "engine": {"max_num_seqs": 2},
            },
            "test",
        )

    def run(self, rows: list[dict[str, Any]], dropped: float = 1.0, **settings: Any) -> dict[str, Any]:
        return self.answer(self.config(dropped, **settings), rows)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Bench]:
    monkeypatch.setattr(regenerate, "Generator", Engine)
    monkeypatch.setattr(regenerate.engine, "check_granted", lambda config, granted: None)
    Engine.loads, Engine.asked = 0, []
    Engine.reply = staticmethod(echo)
    return lambda template: Bench(tmp_path, template)


@pytest.fixture
def bench(make: Callable[[str], Bench]) -> Bench:
    return make(chats.CHATML)


def test_turn_by_turn(bench: Bench) -> None:
    report = bench.run([
        row("s: be", "u: one", "a: source's", "u: two", "a: source's", id="a", domain="x"),
        row("u: three", "u: four", id="b", split="train"),
    ])  # fmt: skip
    assert bench.texts() == [
        ["s: be", "u: one", "a: to one", "u: two", "a: to two"],
        ["u: three", "a: to three", "u: four", "a: to four"],
    ]
    first, second = bench.written
    assert (first["id"], first["domain"], second["split"]) == ("a", "x", "train")
    ids = [[*Engine.tokenizer(f"to {word}", add_special_tokens=False)["input_ids"], END] for word in ("one", "two")]
    noted = {"fingerprint": "mine", "finish_reasons": ["stop", "stop"], "token_ids": ids}
    assert noted.items() <= first["generated"].items()
    # The second question comes with the target's own first answer before it.
    assert any("to one<|im_end|>\n<|im_start|>user\ntwo" in asked for asked in Engine.asked)
    assert not any("source's" in asked for asked in Engine.asked)
    assert (report["kept"], report["answers"], report["finish_reasons"], report["dropped"]) == (2, 4, {"stop": 4}, {})
    assert report["generated_tokens"] == report["answer_tokens"] > 0


def test_asking_again_sends_nothing(bench: Bench) -> None:
    rows = [row(f"u: q{n}") for n in range(5)]
    bench.run(rows)
    before = bench.written
    asked = len(Engine.asked)
    report = bench.run(rows)
    assert (Engine.loads, len(Engine.asked)) == (1, asked)
    assert bench.written == before
    assert report["reused"] == 5
    # A new question is asked alone, and an order of its own has no effect.
    bench.run([row("u: new"), *rows[::-1]])
    assert (Engine.loads, len(Engine.asked)) == (2, asked + 1)
    assert [texts[0] for texts in bench.texts()] == ["u: new", "u: q4", "u: q3", "u: q2", "u: q1", "u: q0"]
    # Answers do not change what is asked.
    bench.run([row("u: q1", "a: the source's other answer")])
    assert Engine.loads == 2


@pytest.mark.parametrize("shards", [2, 3, 50])
def test_shards_answer_what_one_answers(bench: Bench, shards: int) -> None:
    """Each question once, some shards have none; joined in the order of the data. Another number of shards asks nothing."""
    rows = [row(f"u: q{n}", id=str(n)) for n in range(20)] + [row("u: q3", id="again")]
    report = bench.answer(bench.config(1.0), rows, shards)
    assert [texts[0] for texts in bench.texts()] == [f"u: q{n}" for n in range(20)]
    assert (report["kept"], report["dropped"], report["reused"], report["shards"]) == (20, {"duplicate": 1}, 0, shards)
    assert report["generated_tokens"] == report["answer_tokens"] > 0
    asked = [json.loads(path.read_text())["conversations"] for path in bench.folder.glob("shards-*.json")]
    # None of two or three shards is empty; a load is made where there is something to ask.
    assert (sum(asked), len(asked), 0 in asked) == (20, shards, shards == 50)
    assert (len(Engine.asked), Engine.loads) == (20, sum(count > 0 for count in asked))
    before, loads = bench.written, Engine.loads
    again = bench.answer(bench.config(1.0), rows, 1)
    assert (again["reused"], Engine.loads, bench.written) == (20, loads, before)
    assert (again["by"], again["tokens_per_second"]) == (None, None)


def test_failures_of_shards_are_counted_together(bench: Bench) -> None:
    """Each shard by itself is within the share that may fail, both together are not."""
    Engine.reply = staticmethod(lambda prompt: "abort" if "bad" in prompt else echo(prompt))
    rows = [row(f"u: {'bad' if n < 8 else 'q'}{n}") for n in range(20)]
    report = bench.answer(bench.config(0.4), rows, 2)
    assert (report["dropped"], report["kept"]) == ({"failed": 8}, 12)
    assert {entry["error"] for entry in report["failed"]} == {"the request was ended with 'abort'"}
    failed = [len(json.loads(path.read_text())["failed"]) for path in bench.folder.glob("shards-*.json")]
    assert (sum(failed), max(failed) <= 6) == (8, True)
    with pytest.raises(DraftsmithError, match=r"data.max_dropped_fraction"):
        bench.answer(bench.config(0.3), rows, 2)
    # Both had come to their end, and are to ask again.
    assert list(bench.folder.glob("shards-*.json")) == []
    Engine.reply, asked = staticmethod(echo), len(Engine.asked)
    assert bench.answer(bench.config(0.3), rows, 2)["kept"] == 20
    assert len(Engine.asked) == asked + 8


def test_answers_that_were_removed_are_asked_for_again(bench: Bench) -> None:
    """Which shard's they were is told by the questions; it alone asks again, and no conversation is left out in silence."""
    rows = [row(f"u: q{n}") for n in range(20)]
    bench.answer(bench.config(1.0), rows, 2)
    (bench.folder / "out.jsonl").unlink()
    first, second = sorted(bench.folder.glob("shards-*.json"))
    part = min((bench.folder / "work").glob("*/part-*.jsonl"))
    lost = len(part.read_text().splitlines())
    part.unlink()
    with pytest.raises(
        DraftsmithError,
        match=rf"{lost} conversations have no answer there, the first is .*data.jsonl, line \d+: .*shard 1-of-2",
    ):
        merge(bench.config(1.0), bench.folder, [first, second])
    assert (first.exists(), second.exists(), (bench.folder / "out.jsonl").exists()) == (False, True, False)
    asked = len(Engine.asked)
    assert bench.answer(bench.config(1.0), rows, 2)["kept"] == 20
    assert len(Engine.asked) == asked + lost


def test_a_damaged_part_is_named_and_its_answers_are_asked_for_again(bench: Bench) -> None:
    rows = [row(f"u: q{n}") for n in range(4)]
    bench.answer(bench.config(1.0), rows)
    (part,) = (bench.folder / "work").glob("*/part-*.jsonl")
    part.write_text("{")
    shard = bench.folder / "shards-1-of-1.json"
    with pytest.raises(
        DraftsmithError,
        match=r"part-.*, line 1: damaged .*; delete the file, and what was answered in it is asked again",
    ):
        merge(bench.config(1.0), bench.folder, [shard])
    assert not shard.exists()
    part.unlink()
    assert bench.answer(bench.config(1.0), rows)["kept"] == 4


@pytest.mark.parametrize("change", ["temperature", "template", "target"])
def test_what_changes_answers_asks_again(bench: Bench, change: str) -> None:
    bench.run([row("u: q")])
    settings = {"temperature": 0.5} if change == "temperature" else {}
    if change == "template":
        Engine.tokenizer.chat_template = chats.CHATML + " "
        Engine.tokenizer.save_pretrained(bench.folder / "target")
    if change == "target":
        target = json.loads((bench.folder / "target.json").read_text())
        (bench.folder / "target.json").write_text(json.dumps(target | {"fingerprint": "other"}))
    bench.run([row("u: q")], **settings)
    assert Engine.loads == 2


def test_what_was_answered_before_the_engine_died_is_kept(bench: Bench) -> None:
    rows = [row(f"u: q{n}") for n in range(8)]
    Engine.reply = staticmethod(lambda prompt: None if "q5" in prompt else "fine")
    with pytest.raises(RuntimeError, match="the engine died"):
        bench.run(rows)
    assert not (bench.folder / "out.jsonl").exists()
    Engine.reply = staticmethod(lambda prompt: "fine")
    Engine.asked = []
    report = bench.run(rows)
    assert report["reused"] == 5
    assert len(Engine.asked) == 3
    assert len(bench.written) == 8


def test_cut_answers(bench: Bench) -> None:
    Engine.reply = staticmethod(
        lambda prompt: "it is…" if prompt.endswith("q<|im_end|>\n<|im_start|>assistant\n") else "fine"
    )
    rows = [row("u: q", "u: r"), row("u: r", "u: q"), row("u: x")]
    report = bench.run(rows)
    assert bench.written[0]["messages"][1] == {"role": "assistant", "content": "it is", "truncated": True}
    assert bench.written[0]["generated"]["finish_reasons"] == ["length", "stop"]
    assert report["finish_reasons"] == {"length": 2, "stop": 3}
    report = bench.run(rows, unfinished="drop")
    # Nothing follows an answer that is not kept; what came before stays.
    assert bench.texts() == [["u: r", "a: fine"], ["u: x", "a: fine"]]
    assert report["dropped"] == {"truncated": 1}
    assert report["shortened"] == {"truncated": 1}
    # Which of the two is dropped is decided at the end: nothing is asked for it.
    asked = len(Engine.asked)
    report = bench.run(rows, unfinished="drop_conversation")
    assert bench.texts() == [["u: x", "a: fine"]]
    assert (report["dropped"], report["shortened"]) == ({"truncated": 2}, {})
    assert len(Engine.asked) == asked


def test_empty_answers(bench: Bench) -> None:
    Engine.reply = staticmethod(lambda prompt: "" if "q<|im_end|>" in prompt else "fine")
    report = bench.run([row("u: q", "u: r"), row("u: r", "u: q")])
    assert bench.texts() == [["u: r", "a: fine"]]
    assert (report["dropped"], report["shortened"]) == ({"empty_answer": 1}, {"empty_answer": 1})
    with pytest.raises(DraftsmithError, match=r"1 of 2 conversations cannot be used.*empty_answer 1"):
        bench.run([row("u: q", "u: r"), row("u: r", "u: q")], dropped=0.1)


def test_failures_keep_their_cause_and_are_asked_again(bench: Bench) -> None:
    rows = [row("u: q", id="a"), row("u: r", id="b")]
    Engine.reply = staticmethod(lambda prompt: "abort" if "q<|im_end|>" in prompt else "fine")
    report = bench.run(rows)
    assert report["dropped"] == {"failed": 1}
    [failed] = report["failed"]
    assert (failed["conversation_id"], failed["turn"]) == ("a", 1)
    assert "'abort'" in failed["error"]
    Engine.reply = staticmethod(lambda prompt: "fine")
    assert bench.run(rows)["failed"] == []
    assert len(bench.written) == 2


def test_a_request_that_the_engine_refuses(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(self: Engine, question: Question) -> None:
        raise ValueError("no such token")

    monkeypatch.setattr(Engine, "ask", ask)
    with pytest.raises(DraftsmithError, match=r"1 conversations failed.*ValueError: no such token"):
        bench.run([row("u: q")], dropped=0.5)


def test_reasons(bench: Bench) -> None:
    report = bench.run(
        [row("u: q"), row("u: q", "a: x"), row("s: only"), row("u: " + "z" * 300), {"messages": [{"role": "critic"}]}]
    )
    assert report["dropped"] == {"duplicate": 1, "no_question": 1, "unknown_role": 1, "prompt_too_long": 1}
    assert report["dropped_examples"]["duplicate"] == f"{bench.folder}/data.jsonl, line 2"
    assert report["kept"] == 1


def test_a_template_that_refuses(make: Callable[[str], Bench]) -> None:
    strict = "{% if messages | length > 1 %}{{ raise_exception('one only') }}{% endif %}" + chats.CHATML
    report = make(strict).run([row("u: q", "u: r"), row("s: be", "u: q")])
    assert report["shortened"] == {"template_refused": 1}
    assert report["dropped"] == {"template_refused": 1}


def test_reasoning_goes_the_whole_way(make: Callable[[str], Bench]) -> None:
    bench = make(chats.QWEN)
    Engine.reply = staticmethod(lambda prompt: "<think>\nhm\n</think>\n\nfine")
    bench.run([row("u: q", "u: r", id="a")])
    assert bench.written[0]["messages"][1] == {"role": "assistant", "content": "fine", "reasoning_content": "hm"}
    # As it is served, the next prompt has the answer without the reasoning.
    assert Engine.asked[1].startswith("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nfine<|im_end|>")
    out = {name: bench.folder / name for name in ("rows", "prompts", "report")}
    tokenize.run(
        bench.config(0.0), target=bench.folder / "target.json", conversations=bench.folder / "out.jsonl", **out
    )
    import pandas as pd

    rows = pd.read_parquet(out["rows"])
    asked = [Engine.tokenizer(text, add_special_tokens=False)["input_ids"] for text in Engine.asked]
    ids = bench.written[0]["generated"]["token_ids"]
    assert [list(ids) for ids in rows.input_ids] == [[*asked[0], *ids[0]], [*asked[1], *ids[1]]]
