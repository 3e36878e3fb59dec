"""Templates of which one rendering tells all the earlier ones: the same texts, and no template is taken for one by mistake."""

from __future__ import annotations

from typing import Any

import pytest

import chats
from draftsmith.chat import Chat
from draftsmith.chat.steady_template import MARK, SteadyTemplate
from draftsmith.conversations import Message, Unusable
from kinds import KINDS

# With what real templates have around the loop: the system message apart, a default, white space that is trimmed, macros.
APART = (
    "{%- if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif -%}\n"
    "{% macro show(text) %}{{ text | trim }}{% endmacro %}\n"
    "{%- if messages[0]['role'] == 'system' %}\n    {{- '<|im_start|>' + messages[0]['content'] }}\n"
    "    {%- set rest = messages[1:] %}\n{%- else %}\n    {%- set rest = messages %}\n{%- endif %}\n"
    "{%- for m in rest -%}\n    {%- if loop.first %}first {% endif %}\n    <|im_start|>{{ m.role }}\n {{ show(m.content) }}<|im_end|>\n"
    "    {%- for c in m.tool_calls or [] %}{{ c.function.name }}{% if not loop.last %},{% endif %}{% endfor %}\n"
    "{% endfor -%}\nend\n"
    "{% if add_generation_prompt and not quiet %}<|im_start|>assistant{{ ' with ' ~ (tools | length) if tools else '' }}\n{% endif %}"
)
REBOUND = "{% if messages[0].role == 'system' %}{% set messages = messages[1:] %}{% endif %}" + chats.CHATML
LOOP = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"

STEADY = {
    "chatml": chats.CHATML, "tagged": chats.TAGGED, "llama3": chats.LLAMA3, "gemma": chats.GEMMA, "deepseek": chats.DEEPSEEK,
    "kimi": chats.KIMI.replace("kimi", ""), "apart": APART, "rebound": REBOUND, "plain": LOOP + PROMPT, "no prompt": LOOP,
    "trimmed": "{%- for m in messages -%}\n  {{ m.content }}\n{%- endfor -%}\n" + PROMPT,
    "kept": "{% for m in messages +%}\n {% if m.content %} {{ m.content }}{% endif %}\n{% endfor +%}\n" + PROMPT,
    "changed": "{% for m in messages %}{% if loop.changed(m.role) %}#{% endif %}{{ m.content }}{{ loop.previtem.role if loop.index0 else '' }}{% endfor %}",
    "counted": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ m.content }}{% endfor %}" + PROMPT,
}  # fmt: skip

NOT_STEADY = {
    "last": LOOP.replace("{{ m.content }}", "{{ m.content if loop.last else '' }}"),
    "length": "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ m.content }}{% endfor %}",
    "next": "{% for m in messages %}{{ m.content }}{% if loop.nextitem %},{% endif %}{% endfor %}",
    "loop handed on": "{% for m in messages %}{{ m.content }}{% set l = loop %}{% if l.last %}!{% endif %}{% endfor %}",
    "outer loop": "{% for m in messages %}{% for c in [loop.last] %}{{ c }}{% endfor %}{{ m.content }}{% endfor %}",
    "last message": "{% for m in messages %}{{ m.content if m == messages[-1] else '' }}{% endfor %}",
    "second message": "{% for m in messages %}{{ m.content }}{{ messages[1].role }}{% endfor %}",
    "number of messages": "{% for m in messages %}{{ m.content }}{% endfor %}{% if messages | length > 2 %}long{% endif %}",
    "length before": "{{ messages | length }}" + LOOP,
    "another list": "{% set m2 = messages | list %}{% for m in messages %}{{ m2[0].content }}{{ m.content }}{% endfor %}",
    "first of the rest": "{% set rest = messages[1:] %}{% for m in messages %}{{ rest[0].role }}{{ m.content }}{% endfor %}",
    "shorter and shorter": "{% for m in messages %}{% set messages = messages[1:] %}{{ messages[0].role }}{{ m.content }}{% endfor %}",
    "shorter in a macro": "{% macro f() %}{% set messages = messages[1:] %}{{ messages[0].role }}{% endmacro %}" + LOOP + "{{ f() }}",
    "two loops": "{% for m in messages %}{{ m.role }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}",
    "inner loop": "{% if true %}" + LOOP + "{% endif %}" + PROMPT,
    "condition": "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}" + PROMPT,
    "otherwise": "{% for m in messages %}{{ m.content }}{% else %}nothing{% endfor %}",
    "backwards": "{% for m in messages[::-1] %}{{ m.content }}{% endfor %}",
    "filtered": "{% for m in messages | reverse %}{{ m.content }}{% endfor %}",
    "prompt in the loop": "{% for m in messages %}{{ m.content }}{% if add_generation_prompt %}?{% endif %}{% endfor %}" + PROMPT,
    "prompt before": "{% set p = add_generation_prompt %}" + LOOP + PROMPT,
    "prompt by state": "{% set ns = namespace(t=0) %}{% for m in messages %}{% set ns.t = m.role %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ ns.t }}{% endif %}",
    "end by state": "{% set ns = namespace(t=0) %}{% for m in messages %}{% set ns.t = m.role %}{{ m.content }}{% endfor %}{{ ns.t }}",
    "no prompt, no end": LOOP + "{% if not add_generation_prompt %}{{ messages[0].role }}{% endif %}",
    "stops": "{% for m in messages %}{{ m.content }}{% if m.role == 'tool' %}{% break %}{% endif %}{% endfor %}",
    "recursive": "{% for m in messages recursive %}{{ m.content }}{% endfor %}",
    "no template": "{% for m in messages %}",
    "mistral": chats.MISTRAL, "qwen": chats.QWEN,
}  # fmt: skip

CONVERSATIONS: dict[str, list[Message]] = {
    "turns": chats.talk("hi", "The answer", " what? \n", " It is 3.", "and?", "Yes.").messages,
    "system": chats.talk("hi", "The answer", "what?", "It is 3.", system=" be brief").messages,
    "one": chats.talk("hi", "A").messages,
    "answer first": [{"role": "assistant", "content": "Hello"}, *chats.talk("hi", "A", "so", "B").messages],
    "calls": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": name, "arguments": {"a": 1}}} for name in ("f", "g")
        ]},
        {"role": "tool", "content": "3"}, {"role": "assistant", "content": "It is 3."}, {"role": "assistant", "content": "Yes."},
    ],
    "reasoning": chats.talk("hi", "t1 >> A1", "more", "t2 >> A2").messages,
    "marks": chats.talk("hi", f"A {MARK} B", "more", "C").messages,
    "developer": [*chats.talk("hi", "A").messages, {"role": "developer", "content": "be brief"}, *chats.talk("so", "B").messages],
}  # fmt: skip


def apart(chat: Chat, messages: list[Message], tools: Any, answers: list[int]) -> Any:
    """Each rendering by itself, or the reason why one fails."""
    try:
        closed = [chat.render(messages[: index + 1], tools, prompt=False) for index in answers]
        return [chat.render(messages[:index], tools, prompt=True) for index in answers], closed
    except Unusable as unusable:
        return str(unusable)


def at_once(chat: Chat, messages: list[Message], tools: Any, answers: list[int]) -> Any:
    try:
        return chat.renderings(messages, tools, answers, prompts=True)
    except Unusable as unusable:
        return str(unusable)


@pytest.mark.parametrize("name", STEADY)
def test_one_rendering_tells_all(name: str) -> None:
    family = next((family for family in ("llama3", "gemma", "deepseek", "kimi") if family in name), "chatml")
    chat = chats.chat(STEADY[name], family)
    chat._compared = 1 << 30
    assert chat._steady is not None
    one_rendering = 0
    for tools in (None, [{"type": "function", "function": {"name": "f"}}]):
        for messages in CONVERSATIONS.values():
            asked = next(place for place, message in enumerate(messages) if message["role"] == "user")
            answers = [
                place for place, message in enumerate(messages) if message["role"] == "assistant" and place > asked
            ]
            assert at_once(chat, messages, tools, answers) == apart(chat, messages, tools, answers)
            one_rendering += chat._by_pieces(messages[: answers[-1] + 1], tools, answers, True) is not None
    # All but the one with marks in its text, the developer's, and those that a template refuses.
    assert one_rendering >= (4 if family == "gemma" else 10)


@pytest.mark.parametrize("name", NOT_STEADY)
def test_others_are_not_taken_for_one(name: str) -> None:
    assert SteadyTemplate.of(NOT_STEADY[name]) is None


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_templates(name: str) -> None:
    """Whichever way it goes, the texts are those of renderings apart."""
    kind = KINDS[name]
    for arguments in (kind.plain, kind.thinking):
        chat = kind.chat(arguments)
        chat._compared = 1 << 30
        for messages in CONVERSATIONS.values():
            answers = [place for place, message in enumerate(messages) if message["role"] == "assistant" and place]
            assert at_once(chat, messages, None, answers) == apart(chat, messages, None, answers)


def test_templates_that_are_known_to_append() -> None:
    steady = {name for name, kind in KINDS.items() if SteadyTemplate.of(kind.template) is not None}
    assert {"llama3", "gemma"} <= steady
    # They rewrite history.
    assert not {"deepseek", "glm", "harmony", "mistral"} & steady


def test_a_library_that_renders_otherwise_is_found_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = chats.chat(chats.CHATML)
    monkeypatch.setattr(SteadyTemplate, "pieces", lambda self, rendered, messages, least: ["x"] * messages)
    messages = CONVERSATIONS["turns"]
    assert chat.renderings(messages, None, [1, 3], prompts=True) == apart(chat, messages, None, [1, 3])
    assert "each is rendered apart" in capsys.readouterr().err
    assert chat._steady is None


def test_the_cost_is_one_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = chats.chat(chats.CHATML)
    chat._compared = 1 << 30
    rendered = []
    apply = chat.tokenizer.apply_chat_template
    monkeypatch.setattr(
        chat.tokenizer, "apply_chat_template", lambda *args, **kw: rendered.append(1) or apply(*args, **kw)
    )
    for _ in range(3):
        chat.renderings(CONVERSATIONS["turns"], None, [1, 3, 5], prompts=True)
    # And once the header of the answer to come.
    assert len(rendered) == 4
