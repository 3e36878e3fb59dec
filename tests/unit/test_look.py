"""The page about the data: what is coloured is what is supervised, and what is text stays text."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import chats
from draftsmith import look, report
from draftsmith.cli import app
from draftsmith.config import Config
from draftsmith.errors import DraftsmithError
from rows_to_see import SeenPage, row, write_prompts, write_rows

EVIL = "<script>alert('x')</script>\n<b> & \"</mark></span></details>\t\u202eabc"


class Bench:
    """A folder with a target whose tokenizer is byte-level BPE."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = chats.fast(chats.CHATML)
        self.tokenizer.save_pretrained(folder / "model")
        self.target = folder / "target.json"
        self.target.write_text(
            json.dumps({"path": str(folder / "model"), "trust_remote_code": False, "source": "tiny"})
        )

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def talk(self, question: str, *answers: str, **more: Any) -> dict[str, Any]:
        """A row in which the answers and their ends of turn are supervised."""
        ids: list[int] = []
        spans = []
        for answer in answers:
            ids += self.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
            written = self.encode(f"{answer}<|im_end|>")
            spans.append((len(ids), len(ids) + len(written)))
            ids += [*written, *self.encode("\n")]
        return row(ids[: spans[-1][1]], spans, **more)

    def draw(self, rows: list[dict[str, Any]], seed: int = 0, **files: Path | None) -> SeenPage:
        given = {"tokenize_report": None, "vocabulary_report": None, "prompts": None} | files
        page = self.folder / "page.html"
        look.run(
            Config(), target=self.target, rows=write_rows(self.folder / "rows.parquet", rows), page=page, seed=seed,
            report=self.folder / "look.json", **given,
        )  # fmt: skip
        return SeenPage(page)

    def figures(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "look.json").read_text()))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(report, "get_plotlyjs", lambda: "/* plotly.js */")
    return Bench(tmp_path)


def supervised(given: dict[str, Any]) -> set[int]:
    return {
        place
        for start, end in zip(given["span_starts"], given["span_ends"], strict=True)
        for place in range(start, end)
    }


def test_what_is_coloured_is_what_is_supervised(bench: Bench) -> None:
    rng = random.Random(0)
    rows = []
    for place in range(8):
        ids = [rng.randrange(3, 290) for _ in range(rng.randrange(20, 200))]
        # Borders drawn at random: at the first token, at the last one, and spans that touch.
        borders = sorted(rng.sample(range(1, len(ids)), 3))
        spans = [(0, borders[0]), (borders[0], borders[1]), (borders[2], len(ids))][place % 2 :]
        rows.append(row(ids, spans, conversation_id=f"c{place}"))
    page = bench.draw(rows)
    assert len(page.rows) == 8
    by_ids = {tuple(given["input_ids"]): given for given in rows}
    for seen in page.rows:
        given = by_ids.pop(tuple(token.id for token in seen.tokens))
        assert [token.place for token in seen.tokens] == list(range(given["length"]))
        assert {token.place for token in seen.tokens if token.supervised} == supervised(given)
        for fact in (given["row_id"], given["conversation_id"], "s.jsonl", "chat", f"{given['supervised']} tokens"):
            assert fact in seen.about


def test_texts_are_those_of_the_tokenizer_and_special_tokens_are_marked(bench: Bench) -> None:
    answers = ("The answer is 5.", "  Ünïcödé 🙂 你好\n\n\tdone  ", "a\u200bb\u00a0c")
    given = bench.talk("what is it", *answers)
    seen = bench.draw([given]).rows[0]
    assert "".join(token.text for token in seen.tokens) == bench.tokenizer.decode(given["input_ids"])
    assert [token.place for token in seen.tokens if token.special] == [
        place for place, token in enumerate(given["input_ids"]) if token in (0, 1)
    ]


def test_a_long_row_keeps_every_border_and_counts_what_it_leaves_out(bench: Bench) -> None:
    ids = [random.Random(1).randrange(3, 290) for _ in range(5000)]
    spans = [(1000, 1003), (1200, 2900), (2900, 3100), (4998, 5000)]
    given = row(ids, spans)
    seen = bench.draw([given]).rows[0]
    places = {token.place for token in seen.tokens}
    inside = supervised(given)
    assert {token.place for token in seen.tokens if token.supervised} == inside & places
    assert all(token.id == ids[token.place] for token in seen.tokens)
    for border in (0, 1000, 1003, 1200, 2900, 3100, 4998):
        assert {border - 1, border, border + 1} - {-1} <= places
    assert len(places) <= 600
    left_out = [int(gap.split()[1].replace(",", "")) for gap in seen.gaps]
    assert sum(left_out) == 5000 - len(places)
    assert any("none of them supervised" in gap for gap in seen.gaps)
    assert any("all of them supervised" in gap for gap in seen.gaps)
    assert "and 0 more" not in seen.about
    assert "1,700 tokens, 1200 to 2899" in seen.about


def test_text_from_the_data_stays_text(bench: Bench) -> None:
    plain = bench.draw([bench.talk("what is it", "the answer is")])
    given = bench.talk(EVIL, EVIL, conversation_id=EVIL, source=EVIL, domain=EVIL)
    page = bench.draw([given], prompts=write_prompts(bench.folder / "prompts.jsonl", [(EVIL, EVIL)]))
    assert page.scripts == plain.scripts
    assert "".join(token.text for token in page.rows[0].tokens) == bench.tokenizer.decode(given["input_ids"])
    source = (bench.folder / "page.html").read_text()
    assert "<script>alert" not in source
    # Within tokens it would turn the direction of what follows.
    assert "\u202e" not in source.split('class="tokens"')[1].split("</div>")[0]


def test_the_page_stays_small_whatever_the_rows_are(bench: Bench) -> None:
    rng = random.Random(2)
    rows = []
    for place in range(120):
        ids = [rng.randrange(3, 290) for _ in range(8000)]
        spans = [(at, at + rng.randrange(1, 30)) for at in range(40, 8000, 40)]
        name = f"{place:03}" + "<" * 3000
        rows.append(row(ids, spans, domain=name, source=name, conversation_id=name))
    page = bench.draw(rows)
    assert len(page.rows) <= 45
    assert (bench.folder / "page.html").stat().st_size < 3_000_000
    assert (bench.folder / "look.json").stat().st_size < 3_000_000


def test_ends_of_every_measure_and_each_domain_and_source_are_shown(bench: Bench) -> None:
    def made(place: int, length: int, spans: list[tuple[int, int]], **more: Any) -> dict[str, Any]:
        return row([place % 200 + 50, *range(3, length + 2)], spans, row_id=f"{place:032x}", **more)

    ordinary = [made(place, 40, [(10, 30)]) for place in range(300)]
    special = {
        "longest": made(1001, 90, [(10, 60)]), "shortest": made(1002, 12, [(5, 10)]), "most answers": made(1005, 40, [(1, 2), (4, 20), (25, 30)]),
        "largest share supervised": made(1003, 41, [(1, 41)]), "smallest share supervised": made(1004, 42, [(41, 42)]),
        "domain rare": made(1006, 40, [(10, 30)], domain="rare"), "source other.jsonl": made(1007, 40, [(10, 30)], source="other.jsonl"),
        "held out for validation": made(1008, 40, [(10, 30)], split="validation"),
    }  # fmt: skip
    rows = [*ordinary, *special.values()]
    bench.draw(rows)
    first = {found["row_id"]: found["why"] for found in bench.figures()["sample"]}
    for reason, given in special.items():
        assert reason in first[given["row_id"]], reason
    assert sum("at random" in why for why in first.values()) == 6
    # The same rows in another order: the same sample; another seed: another one, but the same ends.
    bench.draw(random.Random(3).sample(rows, len(rows)))
    assert {found["row_id"]: found["why"] for found in bench.figures()["sample"]} == first
    bench.draw(rows, seed=1)
    second = {found["row_id"]: found["why"] for found in bench.figures()["sample"]}
    assert {name for name, why in second.items() if "at random" in why} != {
        name for name, why in first.items() if "at random" in why
    }
    assert "longest" in second[special["longest"]["row_id"]]


def test_a_row_that_was_cut_is_shown_and_says_so(bench: Bench) -> None:
    """One of many of the same kind; it is told in its summary, at its length, and where it ends."""
    rows = [row([place, *range(3, 40)], [(10, 38)], cut=False) for place in range(50, 150)]
    cut = row([200, *range(3, 40)], [(10, 38)], cut=True)
    page = bench.draw([*rows, cut])
    [seen] = [found for found in page.rows if [token.id for token in found.tokens] == cut["input_ids"]]
    assert seen.gaps == ["… here the row was cut: it was longer than tokenize.max_length …"]
    assert "38 tokens, 73.7% supervised, chat, cut" in seen.about
    assert "(cut: it was longer than tokenize.max_length)" in seen.about
    others = [found for found in page.rows if found is not seen]
    assert len(others) > 5
    assert not any(found.gaps or "cut" in found.about for found in others)
    # A file of another maker may not tell.
    assert not any("cut" in found.about for found in bench.draw([bench.talk("what is it", "the answer is")]).rows)


def test_counts_by_hand(bench: Bench) -> None:
    rows = [
        row([5, 6, 7, 8], [], domain="a"),
        row([5, 6, 7], [(0, 3)], domain="a", repeats=3),
        row(list(range(5, 25)), [(0, 1), (2, 3)], domain="b"),
        row(list(range(5, 26)), [(1, 21)], domain="b", split="validation"),
    ]
    page = bench.draw(rows, prompts=write_prompts(bench.folder / "prompts.jsonl", [("b", "Why?"), ("c", "Where?")]))
    figures = bench.figures()
    assert figures["rows"] == {"train": 3, "validation": 1}
    # None, all, 2 of 20 is just a tenth; 20 of 21 is more than nine tenths, but not all.
    assert figures["supervised_shares"] == {"train": [[0, 1], [1, 1], [11, 1]], "validation": [[10, 1]]}
    assert figures["answer_lengths"] == {"train": [[1, 2], [4, 1]], "validation": [[32, 1]]}
    assert figures["by_domain"]["a"] == {"train": {"rows": 4, "tokens": 7, "supervised": 3}}
    assert figures["by_domain"]["b"]["validation"] == {"rows": 1, "tokens": 21, "supervised": 20}
    assert figures["prompts"] == {"b": 1, "c": 1}
    assert "Rows have no supervised token: 1 of split train." in page.text
    assert "Rows are supervised whole, from the first token on: 1 of split train." in page.text
    assert "The evaluation asks in a domain that training lacks" in page.text


def test_languages_of_both_sides_are_told_apart(bench: Bench) -> None:
    english = [f"Where can I find a good restaurant that is open on day {place}?" for place in range(6)]
    german = [f"Wo finde ich am Tag {place} ein gutes Restaurant, das noch geöffnet ist?" for place in range(4)]
    rows = [bench.talk(text, "the answer is") for text in english]
    page = bench.draw(
        rows, prompts=write_prompts(bench.folder / "p.jsonl", [("chat", text) for text in [*english[:1], *german]])
    )
    assert bench.figures()["languages"]["counts"] == {"train": {"en": 6}, "evaluation": {"de": 4, "en": 1}}
    assert "The evaluation asks in a language that training lacks" in page.text
    assert "de: 4 prompts" in page.text


# ---- what is missing ----


def test_what_was_not_given_is_said_in_its_place(bench: Bench) -> None:
    page = bench.draw([bench.talk("what is it", "the answer is")])
    assert "no file of the stage tokenize was given" in page.text
    assert "no file of the stage map_vocabulary was given" in page.text
    assert "Of the evaluation nothing is known here." in page.text
    assert len(page.rows) == 1


def test_without_a_tokenizer_the_ids_are_shown(bench: Bench) -> None:
    given = bench.talk("what is it", "the answer is")
    bench.target.write_text(json.dumps({"path": str(bench.folder / "gone"), "trust_remote_code": False}))
    page = bench.draw([given])
    assert "Tokens are shown as ids: the target's tokenizer cannot be opened" in page.text
    assert [token.text for token in page.rows[0].tokens] == [f"[{token}]" for token in given["input_ids"]]
    assert {token.place for token in page.rows[0].tokens if token.supervised} == supervised(given)


def test_files_that_cannot_be_read_are_named(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(DraftsmithError, match="holds no rows; run the stage tokenize again"):
        bench.draw([])
    given = [bench.talk("what is it", "the answer is")]
    (tmp_path / "p.jsonl").write_text('{"prompt_id": "1"}\n')
    with pytest.raises(DraftsmithError, match=r"p\.jsonl, line 1: no prompt \(KeyError: 'messages'\)"):
        bench.draw(given, prompts=tmp_path / "p.jsonl")
    with pytest.raises(DraftsmithError, match=r"none\.json: no such file; the stage that makes it has not run"):
        bench.draw(given, tokenize_report=tmp_path / "none.json")
    others = {"report": None, "tokenize_report": None, "vocabulary_report": None, "prompts": None}
    for content, message in ((None, "no such file; run the stage tokenize first"), (b"x", "cannot be read as rows")):
        rows = tmp_path / "other.parquet"
        if content:
            rows.write_bytes(content)
        with pytest.raises(DraftsmithError, match=message):
            look.run(Config(), target=bench.target, rows=rows, page=tmp_path / "page.html", **others)


def test_the_command_needs_no_more_than_rows_and_a_target(bench: Bench) -> None:
    rows = write_rows(bench.folder / "rows.parquet", [bench.talk("what is it", "the answer is")])
    page = bench.folder / "out" / "page.html"
    done = CliRunner().invoke(app, ["look", "--rows", str(rows), "--target", str(bench.target), "--out", str(page)])
    assert done.exit_code == 0, done.output
    seen = SeenPage(page)
    assert len(seen.rows) == 1
    assert f"{rows}: the data" in seen.text
