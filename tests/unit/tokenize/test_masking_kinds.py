"""masking: eight kinds of templates times what conversations are like; the supervised text of each is written out here."""

from __future__ import annotations

from typing import Any

import pytest

from chats import talk
from draftsmith.config import Tokenize
from draftsmith.conversations import Unusable
from draftsmith.tokenize.make_rows import Plan, RowMaker
from draftsmith.tokenize.marks import learn_marks
from draftsmith.tokenize.mask_method import choose
from draftsmith.tokenize.masking import Masker, answer_indices
from kinds import KINDS, Kind
from mask_cases import CONVERSATIONS, EXPECTED


def _arguments(kind: Kind, case: str) -> dict[str, Any]:
    if "reasoning" not in case:
        return kind.plain
    return kind.thinking | {"keep_thinking": case == "reasoning kept"}


def test_nothing_is_left_out() -> None:
    assert set(EXPECTED) == set(KINDS)
    assert all(set(expected) == set(CONVERSATIONS) for expected in EXPECTED.values())


@pytest.mark.parametrize("tokenizer", ["fast", "slow", "tagged"])
@pytest.mark.parametrize("case", CONVERSATIONS)
@pytest.mark.parametrize("name", KINDS)
def test_supervised_text(name: str, case: str, tokenizer: str) -> None:
    kind, conversation, expected = KINDS[name], CONVERSATIONS[case], EXPECTED[name][case]
    chat = kind.chat(_arguments(kind, case), fast=tokenizer != "slow", tagged=tokenizer == "tagged")
    if isinstance(expected, str):
        with pytest.raises(Unusable) as caught:
            Masker(chat, "prefix", learn_marks(chat)).rows(conversation)
        assert caught.value.reason == expected
        return
    # The ways that apply are compared with one another here.
    method, marks = choose(chat, [conversation])
    assert method == "prefix"
    masker = Masker(chat, method, marks)
    rows = masker.rows(conversation)
    assert [[chat.decode(row.ids[start:end]) for start, end in row.spans] for row in rows] == expected
    # The same once the chat trusts one rendering to tell the earlier ones, where it finds that it may.
    chat._compared = 1 << 30
    assert masker.rows(conversation) == rows
    # Each row, up to its last answer, is the prompt that a server would build.
    answers = answer_indices(conversation.messages)
    for row, index in zip(rows, answers[-1:] if len(rows) == 1 else answers, strict=True):
        prompt = chat.render(conversation.messages[:index], conversation.tools, prompt=True)
        assert chat.decode(row.ids[: row.spans[-1][0]]) == prompt
        assert len(row.ids) == row.spans[-1][1]


@pytest.mark.parametrize("name", KINDS)
def test_a_row_cut_at_the_longest_length_has_no_end_of_turn(name: str) -> None:
    kind = KINDS[name]
    chat = kind.chat(kind.plain)
    conversation = talk("what is it, what is it?", "The answer")
    method, marks = choose(chat, [conversation])
    [whole] = Masker(chat, method, marks).rows(conversation)
    target = {"vocab_size": 400, "fingerprint": "mine"}
    settings = Tokenize(max_length=len(whole.ids) - 1, min_supervised_tokens=1)
    [row] = RowMaker(Plan(target, settings, method, marks), chat).make(conversation).rows
    expected = EXPECTED[name]["one turn"][0][0]
    [(start, end)] = row.spans
    supervised = chat.decode(list(row.ids[start:end]))
    assert row.cut
    assert expected.startswith(supervised)
    assert supervised.endswith("The answer")


# By hand: what each way gives for two turns, and whether it applies at all.
@pytest.mark.parametrize(
    ("name", "ways"),
    [
        ("chatml", {"prefix", "generation_tags", "token_scan"}),
        # The tokenizer joins the header's line breaks with what follows.
        ("llama3", {"prefix", "generation_tags"}),
        ("gemma", {"prefix", "generation_tags", "token_scan"}), ("deepseek", {"prefix", "generation_tags", "token_scan"}),
        ("kimi", {"prefix", "generation_tags", "token_scan"}), ("glm", {"prefix", "generation_tags", "token_scan"}),
        ("mistral", {"prefix", "generation_tags", "token_scan"}),
        # The end of an answer is another one in history.
        ("harmony", {"prefix", "generation_tags"}),
    ],
)  # fmt: skip
def test_every_way_that_applies_finds_the_same(name: str, ways: set[str]) -> None:
    kind = KINDS[name]
    chat = kind.chat(kind.plain, tagged=True)
    marks = learn_marks(chat)
    found = set()
    for method in ("prefix", "generation_tags", "token_scan"):
        try:
            rows = Masker(chat, method, marks).rows(CONVERSATIONS["system"])  # type: ignore[arg-type]
        except Unusable:
            continue
        assert [[chat.decode(row.ids[start:end]) for start, end in row.spans] for row in rows] == EXPECTED[name][
            "system"
        ]
        found.add(method)
    assert found == ways
