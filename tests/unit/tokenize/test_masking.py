"""masking: each answer with its end of turn and nothing else, for the templates that matter."""

from __future__ import annotations

import pytest

import chats
from chats import chat, slow, talk
from draftsmith.chat import Chat
from draftsmith.conversations import Conversation, Unusable
from draftsmith.errors import DraftsmithError
from draftsmith.tokenize.marks import learn_marks
from draftsmith.tokenize.mask_method import choose
from draftsmith.tokenize.masking import METHODS, Masker, Method
from kinds import KINDS


def masker(given: Chat, method: Method = "prefix", fingerprint: str = "") -> Masker:
    return Masker(given, method, learn_marks(given), fingerprint)


def answers(given: Chat, conversation: Conversation, method: Method = "prefix") -> list[list[str]]:
    """The supervised texts of each row."""
    rows = masker(given, method).rows(conversation)
    return [[given.decode(row.ids[start:end]) for start, end in row.spans] for row in rows]


def reason(given: Chat, conversation: Conversation) -> str:
    with pytest.raises(Unusable) as caught:
        masker(given).rows(conversation)
    return caught.value.reason


def codes(*parts: int | str) -> list[int]:
    """Ids of the slow tokenizer: code points of texts, special tokens as they are."""
    return [code for part in parts for code in ([part] if isinstance(part, int) else map(ord, part))]


def test_by_hand() -> None:
    # <|im_start|> is 1000 and <|im_end|> 1001; every other id is a character's code point.
    given = Chat(slow(chats.CHATML), {})
    [row] = masker(given).rows(talk("q", "A B", "r", "C"))
    first = codes(1000, "user\nq", 1001, "\n", 1000, "assistant\n")
    second = codes("\n", 1000, "user\nr", 1001, "\n", 1000, "assistant\n")
    assert len(first) == 20
    assert row.ids == [*first, *codes("A B", 1001), *second, *codes("C", 1001)]
    # Nothing of the header, the end of turn, and not the line break behind it, with which the last one would be one longer.
    assert row.spans == [(20, 24), (24 + 21, 24 + 21 + 2)]
    assert len(row.ids) == 47


FAMILIES = [
    (chats.CHATML, "chatml", "<|im_end|>"), (chats.TAGGED, "chatml", "<|im_end|>"), (chats.LLAMA3, "llama3", "<|eot_id|>"),
    (chats.GEMMA, "gemma", "<end_of_turn>"), (chats.QWEN, "chatml", "<|im_end|>"),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["fast", "slow"])
@pytest.mark.parametrize(("template", "special", "end"), FAMILIES)
def test_families(template: str, special: str, end: str, kind: str) -> None:
    given = chat(template, special) if kind == "fast" else Chat(slow(template, special), {})
    assert answers(given, talk("hi", "The answer", "what?", "It is 3.")) == [["The answer" + end, "It is 3." + end]]


@pytest.mark.parametrize("kind", ["fast", "slow"])
def test_system_message_and_what_follows_the_last_answer(kind: str) -> None:
    given = chat(chats.CHATML) if kind == "fast" else Chat(slow(chats.CHATML), {})
    [row] = masker(given).rows(talk("q", "a", "and what is it", system="be brief"))
    assert given.decode(row.ids) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>"
    )
    assert row.spans == [(len(row.ids) - 2, len(row.ids))]


def test_rows_begin_as_the_prompt_that_a_server_builds() -> None:
    # The pre-tokenizer takes '\n\n' apart when a word follows; a prompt ends with it whole.
    given = chat(chats.LLAMA3, "llama3")
    conversation = talk("hi", "The answer", "what?", "It is 3.")
    [row] = masker(given).rows(conversation)
    prompt = masker(given).prompt_ids(conversation.messages[:1], None)
    assert given.encode(given.decode(row.ids)).ids != row.ids
    assert row.ids[: row.spans[0][0]] == prompt
    assert row.ids[: row.spans[1][0]][-len(learn_marks(given).tail) :] == list(learn_marks(given).tail)


def test_an_answer_that_shares_a_token_with_its_header() -> None:
    # '\n\n' is one token, made of the header's line break and the first of the answer's two.
    given = chat(chats.CHATML)
    [row] = masker(given).rows(talk("q", "\n\nThe answer"))
    assert row.straddled == 1
    assert given.decode(row.ids[row.spans[0][0] :]) == "\nThe answer<|im_end|>"
    # The row still begins as it is served.
    assert row.ids[: row.spans[0][0]] == masker(given).prompt_ids(talk("q").messages, None)


def test_pieces_of_a_slow_tokenizer_are_joined_as_served() -> None:
    # '\nA' is one token of this tokenizer, though not behind a prompt, which ends with '\n'.
    given = Chat(slow(chats.CHATML, joined="\nA"), {})
    [row] = masker(given).rows(talk("q", "A B"))
    assert row.ids[row.spans[0][0] - 1 :] == codes("\n", "A B", 1001)


def test_mistral_without_system_message_is_one_row() -> None:
    assert answers(chat(chats.MISTRAL, "mistral"), talk("hi", "a", "what?", "b")) == [[" a</s>", " b</s>"]]


@pytest.mark.parametrize("kind", ["fast", "slow"])
def test_a_moving_system_message_makes_one_row_a_turn(kind: str) -> None:
    given = chat(chats.MISTRAL, "mistral") if kind == "fast" else Chat(slow(chats.MISTRAL, "mistral"), {})
    rows = masker(given).rows(talk("hi", "a", "what?", "b", system="be"))
    assert [given.decode(row.ids) for row in rows] == [
        "<s>[INST] be\n\nhi[/INST] a</s>", "<s>[INST] hi[/INST] a</s>[INST] be\n\nwhat?[/INST] b</s>"
    ]  # fmt: skip
    assert [[given.decode(row.ids[start:end]) for start, end in row.spans] for row in rows] == [[" a</s>"], [" b</s>"]]


def test_reasoning_that_is_stripped_from_history_makes_one_row_a_turn() -> None:
    given = chat(chats.QWEN)
    rows = masker(given).rows(talk("hi", "t1 >> A1", "more", "t2 >> A2"))
    assert [given.decode(row.ids[row.spans[0][0] :]) for row in rows] == [
        "<think>\nt1\n</think>\n\nA1<|im_end|>", "<think>\nt2\n</think>\n\nA2<|im_end|>"
    ]  # fmt: skip
    assert "t1" not in given.decode(rows[1].ids)
    # Each begins as it is served.
    conversation = talk("hi", "t1 >> A1", "more", "t2 >> A2")
    assert rows[1].ids[: rows[1].spans[0][0]] == masker(given).prompt_ids(conversation.messages[:3], None)


@pytest.mark.parametrize(
    ("template", "special", "written"),
    [(chats.DEEPSEEK, "deepseek", "t2\n</think>\n\nA2<|end|>"), (chats.KIMI, "kimi", "t2</think>A2<|im_end|>")],
)
def test_reasoning_that_the_template_never_shows_is_put_back(template: str, special: str, written: str) -> None:
    given = chat(template, special)
    rows = masker(given).rows(talk("hi", "t1 >> A1", "more", "t2 >> A2"))
    assert given.decode(rows[1].ids[rows[1].spans[0][0] :]) == written
    assert len(rows) == 2
    assert rows[1].restored


def test_an_answer_without_the_reasoning_that_its_prompt_opens() -> None:
    assert reason(chat(chats.DEEPSEEK, "deepseek"), talk("hi", "A1")) == "reasoning_missing"
    # Kimi's template closes an empty block.
    assert answers(chat(chats.KIMI, "kimi"), talk("hi", "A1")) == [["</think>A1<|im_end|>"]]
    assert answers(chat(chats.KIMI, "kimi", thinking=False), talk("hi", "A1", "b", "A2")) == [
        ["A1<|im_end|>", "A2<|im_end|>"]
    ]


@pytest.mark.parametrize("kind", ["fast", "slow"])
def test_tools(kind: str) -> None:
    given = (
        chat(chats.KIMI, "kimi", thinking=False)
        if kind == "fast"
        else Chat(slow(chats.KIMI, "kimi"), {"thinking": False})
    )
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    ]
    assert answers(given, Conversation("c", "s", "d", messages)) == [
        ['<|call|>f{"a": 1}<|im_end|>', "It is 3.<|im_end|>"]
    ]


def test_arguments_as_older_templates_want_them() -> None:
    older = chats.KIMI.replace("c.function.arguments | tojson", "':' + c.function.arguments")
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    conversation = Conversation(
        "c", "s", "d", [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    )
    assert answers(chat(older, "kimi", thinking=False), conversation) == [['<|call|>f:{"a": 1}<|im_end|>']]


def test_a_leading_answer_is_only_context() -> None:
    messages = [
        {"role": role, "content": text} for role, text in (("assistant", "hello"), ("user", "q"), ("assistant", "a"))
    ]
    assert answers(chat(chats.CHATML), Conversation("c", "s", "d", messages)) == [["a<|im_end|>"]]
    assert answers(chat(chats.CHATML), Conversation("c", "s", "d", messages), "token_scan") == [["a<|im_end|>"]]
    assert reason(chat(chats.CHATML), Conversation("c", "s", "d", messages[:2])) == "no_answer"
    assert reason(chat(chats.GEMMA, "gemma"), Conversation("c", "s", "d", messages)) == "template_refused"


def test_two_questions_and_two_answers_in_a_row() -> None:
    texts = (("user", "q"), ("user", "r"), ("assistant", "a"), ("assistant", "b"))
    conversation = Conversation("c", "s", "d", [{"role": role, "content": text} for role, text in texts])
    assert answers(chat(chats.CHATML), conversation) == [["a<|im_end|>", "b<|im_end|>"]]
    assert reason(chat(chats.GEMMA, "gemma"), conversation) == "template_refused"


def test_reasons() -> None:
    given = chat(chats.CHATML)
    assert reason(given, talk("q", " ")) == "empty_answer"
    assert reason(given, talk("q")) == "no_answer"
    assert reason(given, talk("q", "a<|im_end|>b")) == "end_of_turn_inside"
    failing = chats.CHATML.replace("{{ m.content }}", "{{ m.content + 5 }}")
    assert reason(chat(failing), talk("q", "a")) == "template_failed"


def test_headers_in_a_users_text_are_not_answers() -> None:
    conversation = talk("q<|im_end|>\n<|im_start|>assistant\nno<|im_end|>", "yes")
    given = chat(chats.CHATML)
    assert answers(given, conversation) == [["yes<|im_end|>"]]
    # The scan finds two where one is expected, and of one row alone the last is meant.
    assert answers(given, conversation, "token_scan") == [["yes<|im_end|>"]]
    with pytest.raises(Unusable, match="3 answers were found and 2 expected"):
        masker(given, "token_scan").rows(
            Conversation("c", "s", "d", [*conversation.messages, *talk("r", "a").messages])
        )


def test_a_cut_answer_has_no_end_of_turn() -> None:
    given = chat(chats.CHATML)
    messages = [dict(message) for message in talk("q", "The", "r", "a").messages]
    messages[1]["truncated"] = True
    for method in ("prefix", "token_scan"):
        assert answers(given, Conversation("c", "s", "d", messages), method) == [["The", "a<|im_end|>"]]


def test_no_end_of_turn_at_all() -> None:
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    assert answers(chat(plain), talk("q", "a.", "r", "b.")) == [["a.", "b."]]


def test_that_no_end_of_turn_is_learnt_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    """GLM's template writes none; the mark of the next role stands for it only where the target stops with that."""
    glm = KINDS["glm"]
    choose(glm.chat({}), [talk("q", "a")])
    assert "warning" not in capfd.readouterr().err
    unknown = Chat(glm.chat({}).tokenizer, {})
    method, marks = choose(unknown, [talk("q", "a", "r", "b")])
    assert "warning: the draft learns no end of turn" in capfd.readouterr().err
    [row] = Masker(unknown, method, marks).rows(talk("q", "a", "r", "b"))
    assert [unknown.decode(row.ids[start:end]) for start, end in row.spans] == [
        "\n<think></think>\na", "\n<think></think>\nb"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "shown", "written"),
    [
        ("<think>", "", "A</think>A"),
        ("<think>\n", "", "A\n</think>\n\nA"),
        ("<think>\n", "</think>", "A</think>A"),
        ("<think>\n", "<think></think>", "A</think>A"),
        ("<think>\n", "<think>\n\n</think>\n\n", "A\n</think>\n\nA"),
    ],
)
def test_reasoning_is_put_back_whatever_block_the_template_shows(asked: str, shown: str, written: str) -> None:
    # It reads as the answer does, which is no sign that it is shown.
    template = chats.CHATML.replace("{{ m.content }}", "{{ shown if m.role == 'assistant' }}{{ m.content }}")
    template = template.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n{{ asked }}{% endif %}")
    assert answers(chat(template, asked=asked, shown=shown), talk("q", "A >> A")) == [[written + "<|im_end|>"]]


TEMPLATES = [chats.TAGGED, chats.TAGGED_WIDE, chats.TAGGED_NARROW]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("method", METHODS)
def test_all_methods_find_the_same(template: str, method: Method) -> None:
    given = chat(template)
    assert answers(given, talk("hi", "The answer", "what?", "It is 3."), method) == [
        ["The answer<|im_end|>", "It is 3.<|im_end|>"]
    ]
    assert choose(given, [talk("hi", "a")])[0] == "prefix"


def test_disagreement_shows_the_row() -> None:
    given = chat(chats.TAGGED_WRONG)
    sample = talk("hi", "The answer", where="a.jsonl, line 5")
    with pytest.raises(
        DraftsmithError,
        match=r"^a\.jsonl, line 5: .*prefix finds 'The answer<.*generation_tags finds ' answer<.*tokenize\.mask: prefix",
    ):
        choose(given, [sample])
    assert choose(given, [sample], "generation_tags")[0] == "generation_tags"


def test_restored_reasoning_is_no_disagreement() -> None:
    assert choose(chat(chats.KIMI, "kimi"), [talk("hi", "t1 >> A1")])[0] == "prefix"


def test_the_next_method_is_taken_where_prefixes_cannot_be_rendered() -> None:
    # A template that wants an answer at the end.
    strict = "{% if messages[-1].role != 'assistant' %}{{ raise_exception('no answer') }}{% endif %}" + chats.TAGGED
    given = chat(strict)
    method, marks = choose(given, [talk("hi", "a", "r", "b")])
    assert method == "generation_tags"
    [row] = Masker(given, method, marks).rows(talk("hi", "a", "r", "b"))
    assert [given.decode(row.ids[start:end]) for start, end in row.spans] == ["a<|im_end|>", "b<|im_end|>"]


def test_a_template_that_never_writes_answers() -> None:
    silent = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    said = r"in none of the first 1 conversations .*prefix: a\.jsonl, line 2: not_aligned"
    with pytest.raises(DraftsmithError, match=said):
        choose(chat(silent), [talk("hi", "a", where="a.jsonl, line 2")])


def test_a_tokenizer_without_template() -> None:
    with pytest.raises(DraftsmithError, match=r"has no chat template; put the one .* chat_template\.jinja"):
        Chat(chats.fast(None), {})


def generated(conversation: Conversation, ids: list[list[int]], whose: str = "mine") -> Conversation:
    noted = {"fingerprint": whose, "finish_reasons": [], "token_ids": ids}
    return Conversation("c", "s", "d", conversation.messages, generated=noted)


def test_what_the_target_wrote_is_kept_to_the_token() -> None:
    given = chat(chats.CHATML)
    conversation = talk("hi", "The", "what?", "a")
    end = given.encode("<|im_end|>").ids
    plain, letters = given.encode("The").ids, [*given.encode("T").ids, *given.encode("h").ids, *given.encode("e").ids]
    last = [*given.encode("a").ids, *end]
    make = masker(given, fingerprint="mine")
    # The same tokens as of the text: one row.
    [row] = make.rows(generated(conversation, [[*plain, *end], last]))
    assert row.ids == make.rows(conversation)[0].ids
    # Others: each answer as it was written, behind its prompt.
    rows = make.rows(generated(conversation, [[*letters, *end], last]))
    prompts = [make.prompt_ids(conversation.messages[:count], None) for count in (1, 3)]
    assert [row.ids for row in rows] == [[*prompts[0], *letters, *end], [*prompts[1], *last]]
    assert rows[0].spans == [(len(prompts[0]), len(prompts[0]) + 4)]
    # Another target's ids mean nothing.
    assert len(make.rows(generated(conversation, [[5], [6]], "another's"))) == 1


def _calling(content: str) -> Conversation:
    call = {"type": "function", "function": {"name": "find_city", "arguments": {"name": "Oslo"}}}
    asked = {"role": "user", "content": "what is it"}
    return Conversation("c", "test", "d", [asked, {"role": "assistant", "content": content, "tool_calls": [call]}])


@pytest.mark.parametrize("content", ["", "The answer"])
def test_a_call_that_the_template_leaves_out_is_not_learnt_as_the_end_of_an_answer(content: str) -> None:
    with pytest.raises(Unusable, match="not_rendered: a call of find_city"):
        masker(chat(chats.CHATML)).rows(_calling(content))
    (row,) = masker(chat(chats.KIMI, "kimi", thinking=False)).rows(_calling(content))
    assert "find_city" in chat(chats.KIMI, "kimi").decode(row.ids[slice(*row.spans[0])])


def test_an_answer_of_reasoning_that_the_template_leaves_out() -> None:
    with pytest.raises(Unusable, match="not_rendered: its reasoning"):
        masker(chat(chats.CHATML)).rows(talk("what is it", "thought >> "))
