"""What the engine will be fed: too long rows, foreign tokens and broken templates are told before a load."""

from __future__ import annotations

from pathlib import Path

import pytest
from looked_at import Make

import tiny
from draftsmith.errors import DraftsmithError
from draftsmith.preflight import text as checks
from draftsmith.verdict import Skip


@pytest.mark.parametrize(
    ("length", "args", "said"),
    [
        (1022, {}, None),
        (1023, {}, "the longest row has 1023 tokens, the target has 1024 positions; lower tokenize.max_length to 1022"),
        (98, {"max_model_len": 100}, None),
        (99, {"max_model_len": 100}, "the longest row has 99 tokens, engine.args.max_model_len is 100; lower tokenize.max_length to 98"),
        (500, {"max_model_len": -1}, None),
        (20, {"max_model_len": "10"}, "the longest row has 20 tokens, engine.args.max_model_len is 10; lower tokenize.max_length to 8"),
        (20, {"max_model_len": 9}, "the longest row has 20 tokens, engine.args.max_model_len is 9; raise engine.args.max_model_len"),
        (20, {"max_model_len": "22"}, None),
    ],
)  # fmt: skip
def test_lengths(make: Make, length: int, args: dict[str, int], said: str | None) -> None:
    """A row takes a position a token, one for the token that ends it, and one is margin."""
    found = checks.lengths(make(rows=[[1], [1] * length], settings={"engine": {"args": args}}))
    assert found == (
        ("fail", said) if said else ("ok", f"the longest of 2 rows has {length} tokens; the target has 1024 positions")
    )


def test_a_limit_that_vllm_would_read(make: Make) -> None:
    """With another argument that it refuses there is but the number itself."""
    args = {"max_model_len": "10", "quantization": "nothing-such"}
    found = checks.lengths(make(rows=[[1] * 20], settings={"engine": {"args": args}}))
    assert found[0] == "fail"
    assert "engine.args.max_model_len is 10" in found[1]


def test_positions_that_no_row_fits_into(make: Make) -> None:
    found = checks.lengths(make(rows=[[1] * 20], max_positions=9))
    assert found == ("fail", "the longest row has 20 tokens, the target has 9 positions; take another target")


def test_a_target_that_tells_no_positions(make: Make) -> None:
    assert checks.lengths(make(max_positions=None))[1].endswith("the target has ? positions")


def test_vocabulary(make: Make) -> None:
    """The tiny tokenizer has 259 tokens, <|im_end|>, its end of turn, is token 2."""
    assert checks.vocabulary(make()) == ("ok", "largest token 5 of 320; the tokenizer has 259")
    assert checks.vocabulary(make(rows=[[1, 320]]))[0] == "fail"
    assert "has token 320, the model's vocabulary ends at 319" in checks.vocabulary(make(rows=[[1, 320]]))[1]
    assert checks.vocabulary(make(vocab_size=250)) == (
        "warn", "largest token 5 of 250; the tokenizer has 259: 9 of them are none of the model's, though no row has one"
    )  # fmt: skip
    assert checks.vocabulary(make(vocab_size=32000))[1].endswith("is it this model's?")
    status, detail = checks.vocabulary(make(rows=[[1, 1]], vocab_size=2))
    assert status == "fail"
    assert "the end-of-turn 2 is none of the model's" in detail


def test_a_tokenizer_that_cannot_be_opened(make: Make, model: Path) -> None:
    (model / "tokenizer.json").write_text("{")
    subject = make(model)
    with pytest.raises(
        DraftsmithError, match=r"model: its tokenizer cannot be opened \(.*fetch its files again"
    ) as error:
        checks.vocabulary(subject)
    assert error.value.__cause__ is not None
    with pytest.raises(Skip, match="the check 'vocabulary' did not pass"):
        checks.template(subject)


TURNS = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages %}", "fails on a conversation of two turns (Unexpected end of template"),
        ("{{ messages[0].nothing.at_all }}", "fails on a conversation of two turns ('dict object' has no attribute"),
        ("{{ raise_exception('one turn only') }}", "fails on a conversation of two turns (one turn only)"),
        ("Hello.", "leaves out what the user said"),
        ("{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}", "leaves out what the assistant said"),
        ("{% if add_generation_prompt %}Go:{% else %}" + TURNS + "{% endif %}", "leaves out the question when it asks for an answer"),
    ],
)  # fmt: skip
def test_a_broken_template(make: Make, model: Path, template: str, said: str) -> None:
    (model / "chat_template.jinja").write_text(template)
    status, detail = checks.template(make(model))
    assert status == "fail"
    assert said in detail
    assert "correct chat_template.jinja" in detail


@pytest.mark.parametrize("template", [None, ""])
def test_no_template(make: Make, model: Path, template: str | None) -> None:
    (model / "chat_template.jinja").unlink()
    if template is not None:
        (model / "chat_template.jinja").write_text(template)
    with pytest.raises(DraftsmithError, match=r"no chat template; put the one .* beside it as chat_template\.jinja"):
        checks.vocabulary(make(model))


def test_a_template_that_writes_tokens_of_another_model(make: Make, model: Path) -> None:
    """Plain text is tokens 3 to 258 of the tiny tokenizer; the model now ends at 200."""
    status, detail = checks.template(make(model, vocab_size=200))
    assert status == "fail"
    assert "the chat template writes token" in detail
    assert "the model's vocabulary ends at 199" in detail


def test_a_sound_template_and_its_arguments(make: Make, model: Path) -> None:
    assert checks.template(make(model))[0] == "ok"
    strict = "{% if style is undefined %}{{ raise_exception('no style') }}{% endif %}"
    (model / "chat_template.jinja").write_text(strict + tiny.CHATML)
    assert "no style" in checks.template(make(model))[1]
    assert checks.template(make(model, settings={"tokenize": {"template_args": {"style": "terse"}}}))[0] == "ok"


@pytest.mark.parametrize(("supervised", "status"), [(0, "warn"), (40, "warn"), (50, "ok"), (950, "ok"), (960, "warn")])
def test_supervision(make: Make, supervised: int, status: str) -> None:
    subject = make()
    subject.tokenised = {"tokens": 1000, "supervised": supervised}
    assert checks.supervision(subject) == (status, f"{supervised / 10:.0f}% of 1000 tokens are supervised")


@pytest.mark.parametrize(("asked", "wanted", "status"), [(3, 6, "ok"), (0, 6, "fail"), (0, 0, "warn")])
def test_no_prompt_to_evaluate_is_told_before_the_extraction(make: Make, asked: int, wanted: int, status: str) -> None:
    subject = make()
    subject.tokenised = {"by_split": {"evaluation": asked}, "evaluation_per_domain": wanted}
    assert checks.evaluation(subject)[0] == status
