"""vllm_chat: what the chat endpoint of the installed vLLM sends, beside what the project renders."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable
from typing import Any

import pytest

import chats
from draftsmith.chat import Chat
from draftsmith.chat.as_served import Shape
from draftsmith.chat.vllm_chat import Refused, ServedChat, request_body
from draftsmith.conversations import Conversation
from draftsmith.preflight.served import compare
from kinds import KINDS
from mask_cases import CONVERSATIONS, EXPECTED

vllm = pytest.importorskip("vllm")

_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 400, "max_position_embeddings": 4096, "torch_dtype": "float32",
}  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], ServedChat]:
    """vLLM's rendering for a tokenizer with its template; the weights and the engine are left out."""

    def made(tokenizer: Any, **config: Any) -> ServedChat:
        folder = tmp_path_factory.mktemp("model")
        tokenizer.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(_CONFIG | config))
        arguments = vllm.EngineArgs(model=str(folder), dtype="float32", enforce_eager=True, max_model_len=1024)
        return ServedChat(arguments.create_engine_config())

    return made


def sample(conversation: Conversation, count: int) -> dict[str, Any]:
    return {
        "conversation_id": conversation.conversation_id,
        "source": conversation.source,
        "messages": conversation.messages[:count],
        "tools": conversation.tools,
    }


@pytest.mark.parametrize("name", KINDS)
def test_every_kind(served: Callable[..., ServedChat], name: str) -> None:
    kind = KINDS[name]
    renderer = served(kind.chat({}).tokenizer)
    compared = 0
    for case, conversation in CONVERSATIONS.items():
        if isinstance(EXPECTED[name][case], str):
            continue
        for arguments in (kind.plain, kind.thinking | {"keep_thinking": True}):
            chat = kind.chat(arguments)
            if name == "harmony" and "reasoning" in case:
                # The template reads a key that vLLM does not give to templates: it builds the prompts of such models itself.
                continue
            for count, message in enumerate(conversation.messages):
                if message["role"] == "assistant" and count:
                    found, ids = compare(chat, renderer, sample(conversation, count), arguments)
                    assert found is None
                    assert ids
                    compared += 1
    assert compared >= 16


# Writes all that it is given, so that a key more or less, or in another place, shows.
EVERYTHING = "{{ messages | tojson }}{{ tools | tojson }}{% if add_generation_prompt %}{{ style }}<|im_start|>assistant\n{% endif %}"


def everything(roles: str = "", template: str = EVERYTHING, **arguments: Any) -> Chat:
    kind = KINDS["chatml"]
    tokenizer = copy.copy(kind.chat({}).tokenizer)
    tokenizer.chat_template = template + roles
    return Chat(tokenizer, arguments)


def rich(role: str = "system") -> Conversation:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"b": "é", "a": [1, None]}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "hi", "name": "bob"},
        {"role": role, "content": "be brief"},
        {"role": "user", "content": "q\nr", "parts": ["q", "r"]},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "f"},
    ]
    tool = {"function": {"parameters": {"type": "object", "properties": {"b": {}, "a": {}}}, "name": "f"}}
    return Conversation("c1", "s.jsonl", "d", messages, [tool])


@pytest.mark.parametrize(
    "template",
    [
        "", "{#- 'developer' -#}", "{%- for m in messages if false %}{% for part in m.content %}{% endfor %}{% endfor -%}",
        "{%- for m in messages if false %}{% generation %}{% for part in m['content'] %}{% endfor %}{% endgeneration %}{% endfor -%}",
        "{%- for part in messages[0].content if false %}{% endfor -%}",
    ],
)  # fmt: skip
@pytest.mark.parametrize("role", ["system", "developer"])
def test_every_key_of_messages_and_tools(served: Callable[..., ServedChat], template: str, role: str) -> None:
    chat = everything(template, style="terse")
    renderer = served(chat.tokenizer)
    found, ids = compare(chat, renderer, sample(rich(role), 5), {"style": "terse"})
    assert found is None
    assert '"arguments": {"b": "é", "a": [1, null]}' in chat.decode(ids)


@pytest.mark.skipif(
    vllm.__version__.startswith("0.26"), reason="0.26 hands over keys of a function that it does not know"
)
def test_keys_of_a_function_that_vllm_does_not_know(terse: ServedChat) -> None:
    conversation = rich()
    assert conversation.tools is not None
    conversation.tools[0]["function"]["extra"] = 1
    found, ids = compare(everything(), terse, sample(conversation, 5), {})
    assert found is None
    assert "extra" not in everything().decode(ids)


@pytest.fixture(scope="module")
def terse(served: Callable[..., ServedChat]) -> ServedChat:
    return served(everything().tokenizer)


def test_a_template_argument_that_the_server_does_not_have(
    terse: ServedChat, capfd: pytest.CaptureFixture[str]
) -> None:
    chat = everything(style="terse")
    found, _ = compare(chat, terse, sample(rich(), 5), {})
    assert found is not None
    status, detail = found
    assert status == "fail"
    assert "the prompt of conversation c1 (s.jsonl) is not the one that vLLM sends: behind '" in detail
    assert "the rows have 'terse<|im_start|>assistant\\n', vLLM '<|im_start|>assistant\\n'" in detail
    assert "tokenize.template_args" in detail
    shown = [line[9:] for line in capfd.readouterr().err.splitlines()]
    assert shown[:2] == ["--- the rows: conversation c1 (s.jsonl)", "+++ vLLM: conversation c1 (s.jsonl)"]
    assert any(line.startswith("-") and line.endswith("terse") for line in shown[2:])
    assert shown[-1] == " <|im_start|>assistant\\n"


@pytest.mark.parametrize(
    ("shape", "message", "rows", "vllm_has"),
    [
        # Reasoning under a name that only the rows have, the role of a developer, a list where a text is sent, and an object as text.
        (Shape(thinking=True), {"role": "assistant", "content": "a", "reasoning_content": "t"}, '"thinking": "t"', "}, "),
        (Shape(developer=True), {"role": "developer", "content": "d"}, "developer", "system"),
        (Shape(parts=True), {"role": "user", "content": "q"}, '[{"type": "text"', '"q"'),
    ],
)  # fmt: skip
def test_messages_in_another_shape(
    terse: ServedChat, shape: Shape, message: dict[str, Any], rows: str, vllm_has: str
) -> None:
    chat = everything()
    chat._shape = shape
    messages = [message, {"role": "user", "content": "q"}]
    found, _ = compare(chat, terse, {"conversation_id": "c", "source": "s", "messages": messages}, {})
    assert found is not None
    said = found[1].split(" the rows have ")[1].split(", vLLM ")
    assert rows in said[0]
    assert vllm_has in said[1]


def test_arguments_of_a_call_are_an_object(served: Callable[..., ServedChat]) -> None:
    """An older template, which wants a text, renders the rows but not what vLLM gives it."""
    template = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ ':' + c.function.arguments }}{% endfor %}{% endfor %}"
    chat = everything(template=template)
    found, _ = compare(chat, served(chat.tokenizer), sample(rich(), 5), {})
    assert found is not None
    assert found[0] == "fail"
    assert (
        'vLLM refuses the prompt of conversation c1 (s.jsonl): can only concatenate str (not "dict") to str' in found[1]
    )


def test_calls_without_an_id(terse: ServedChat) -> None:
    """A request is not taken without; where the template writes it, the rows miss it."""
    conversation = rich()
    del conversation.messages[3]["tool_calls"][0]["id"]
    found, _ = compare(everything(), terse, sample(conversation, 5), {})
    assert found is not None
    assert "call_0" in found[1]


def test_other_tokens_of_the_same_text(terse: ServedChat) -> None:
    chat = everything()
    whole = chat.tokenizer
    # One that knows no words.
    letters = chats.fast(EVERYTHING, "kind chatml", words=())
    chat = Chat(letters, {})
    found, _ = compare(chat, terse, sample(rich(), 5), {})
    assert found is not None
    assert "is the same text for vLLM, but other tokens: token " in found[1]
    assert len(whole) > len(letters)


def test_a_request_that_a_server_does_not_take(terse: ServedChat) -> None:
    with pytest.raises(Refused, match="messages"):
        terse.prompt([{"role": "user", "content": 5}], None, {})


def test_tokens_are_not_added_to(terse: ServedChat) -> None:
    """A template writes its special tokens; vLLM lets the tokenizer add none to a chat's prompt."""
    prompt = terse.prompt([{"role": "user", "content": "q"}], None, {})
    assert prompt.text is not None
    assert prompt.ids == everything().encode(prompt.text).ids


def test_a_request(terse: ServedChat) -> None:
    conversation = rich()
    body = request_body(conversation.messages, conversation.tools, {"style": "terse"})
    assert body["messages"][3] == {
        "role": "assistant", "content": None, "reasoning": "hm", "reasoning_content": "hm",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"b": "é", "a": [1, null]}'}}],
    }  # fmt: skip
    assert body["chat_template_kwargs"] == {"style": "terse"}
    assert not terse.by_harmony


def test_interfaces() -> None:
    """The classes and names that draftsmith.chat.vllm_chat leans on."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.renderers.online_renderer import OnlineRenderer
    from vllm.renderers.registry import renderer_from_config

    wanted = {"model_config", "renderer", "request_logger", "chat_template", "chat_template_content_format"}
    parameters = inspect.signature(OnlineRenderer.__init__).parameters
    assert wanted <= set(parameters)
    needed = {name for name, one in parameters.items() if one.default is inspect.Parameter.empty} - {"self"}
    assert needed <= wanted
    assert inspect.iscoroutinefunction(OnlineRenderer.render_chat)
    assert next(iter(inspect.signature(renderer_from_config).parameters)) == "config"
    assert {"messages", "tools", "tool_choice", "chat_template_kwargs"} <= set(ChatCompletionRequest.model_fields)
