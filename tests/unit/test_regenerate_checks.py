"""Is it the target that a server has: one sentence each for what is found before the first question."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import chats
from draftsmith import config
from draftsmith.errors import DraftsmithError
from fake_server import FakeServer
from regenerate_bench import row
from test_regenerate_endpoint import Bench, bench, make  # noqa: F401 (fixtures)


def error(bench: Bench, server: Any, *rows: dict[str, Any], **settings: Any) -> str:  # noqa: F811
    """The sentence with which the stage ends."""
    with pytest.raises(DraftsmithError) as raised:
        bench.run(server, list(rows) or [row("u: q")], **settings)
    text = str(raised.value)
    assert "\n" not in text
    return text


def test_nobody_is_there(bench: Bench) -> None:  # noqa: F811
    with FakeServer(bench.tokenizer) as server:
        pass
    found = error(bench, server)
    assert found.startswith(f"{server.address}: no server answers there (ConnectError: ")
    assert "vllm serve " + str(bench.folder / "target") in found
    assert "regenerate.endpoint" in found
    # One of several that is not there is told of at once, not when its turn comes.
    with FakeServer(bench.tokenizer) as other:
        assert error(bench, [other.address, server.address]).startswith(server.address)
        assert other.generations == 0


def test_another_address_of_the_server(bench: Bench) -> None:  # noqa: F811
    with FakeServer(bench.tokenizer) as server:
        found = error(bench, server.address.removesuffix("/v1"))
    assert "no server of OpenAI's API (NotFoundError" in found
    assert "usually ends in /v1" in found


@pytest.mark.parametrize(
    "body", ["<!doctype html><p>Welcome</p>", '{"data": [', "", '{"data": ' + "7" * 5000 + "}", "[" * 100_000]
)
def test_no_json_where_the_models_should_be(bench: Bench, body: str) -> None:  # noqa: F811
    with FakeServer(bench.tokenizer, models=body) as server:
        found = error(bench, server)
    assert found.startswith(
        f"{server.address}: this is no server of OpenAI's API (MalformedReply: /models gave broken JSON ("
    )
    assert found.endswith("the address usually ends in /v1, correct regenerate.endpoint")


def test_token_ids_of_another_shape_are_not_relied_on(bench: Bench) -> None:  # noqa: F811
    def spoil(prompt: str, answer: dict[str, Any]) -> dict[str, Any]:
        choice = answer["choices"][0]
        return {
            **answer,
            "choices": [{**choice, "token_ids": list(map(str, choice["token_ids"]))}] if "text" in choice else [choice],
        }

    with FakeServer(bench.tokenizer) as server:
        server.spoil = spoil
        assert bench.run(server, [row("u: q")])["by"]["servers"][0]["api"] == "chat"
        assert "cannot be asked by token ids (token_ids[0] is " in error(bench, server, api="completions")


@pytest.mark.parametrize(
    ("model", "root", "known"),
    [
        ("target", None, True),
        ("somebody/Target", None, True),
        ("Target/", None, True),
        ("any-name", "/elsewhere/target", True),
        ("qwen3-8b", None, False),
        ("any-name", "Qwen/Qwen3-8B", False),
    ],
)
def test_the_models_name(bench: Bench, model: str, root: str | None, known: bool) -> None:  # noqa: F811
    with FakeServer(bench.tokenizer, model=model, root=root) as server:
        if not known:
            found = error(bench, server)
            assert f"the server has {model}" in found
            assert "the target is somebody/Target" in found
            assert "regenerate.model" in found
            assert server.generations == 0
        # Whoever names it says that it is the target.
        settings = {} if known else {"model": model}
        assert bench.run(server, [row("u: q")], **settings)["kept"] == 1
        assert server.requests[-1][1]["model"] == model


def test_a_model_that_is_not_there(bench: Bench) -> None:  # noqa: F811
    with FakeServer(bench.tokenizer) as server:
        assert "the server has no model 'other' but target; correct regenerate.model" in error(
            bench, server, model="other"
        )
        server.how["model"] = None
        assert "the server has no model; start it with the target" in error(bench, server)


def test_an_adapter_is_not_the_target(bench: Bench) -> None:  # noqa: F811
    with FakeServer(bench.tokenizer, parent="base") as server:
        assert "target is an adapter of base, not the target" in error(bench, server, model="target")


def test_a_context_that_is_too_short(bench: Bench) -> None:  # noqa: F811
    # max_length is 200 and max_tokens 64.
    with FakeServer(bench.tokenizer, max_model_len=263) as server:
        assert "context is 263 tokens" in (found := error(bench, server))
        assert "--max-model-len 264" in found
        server.how["max_model_len"] = 264
        assert bench.run(server, [row("u: q")])["kept"] == 1


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_another_template(bench: Bench, api: str) -> None:  # noqa: F811
    other = chats.fast(chats.CHATML.replace("<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n\n{% endif"))
    with FakeServer(other) as server:
        found = error(bench, server, row("u: q", id="first"), api=api)
        assert server.generations == 0
    assert "renders the prompt of conversation first in another way" in found
    # All but the last token, the line break behind the header.
    place = len(
        bench.tokenizer("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant", add_special_tokens=False)["input_ids"]
    )
    assert f"from token {place} on '\\n\\n' " in found
    assert "instead of '\\n' " in found


def test_a_history_is_compared_too(bench: Bench) -> None:  # noqa: F811
    other = chats.fast(
        chats.CHATML.replace("{{ m.content }}", "{{ m.content | upper if m.role == 'assistant' else m.content }}")
    )
    with FakeServer(other) as server:
        assert "the prompt of a greeting in another way" in error(bench, server)


def test_another_tokenizer(bench: Bench) -> None:  # noqa: F811
    with FakeServer(chats.fast(chats.CHATML, "llama3", "<|eot_id|>")) as server:
        assert "in another way than the target's tokenizer" in error(bench, server)


def test_a_server_without_tokenize_is_said_so(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    with FakeServer(bench.tokenizer, tokenize=False) as server:
        assert bench.run(server, [row("u: q")])["kept"] == 1
    assert "it has no /tokenize, so that its chat template could not be compared" in capsys.readouterr().err


def test_token_ids_that_a_server_cannot_give(bench: Bench) -> None:  # noqa: F811
    with FakeServer(bench.tokenizer, token_ids=False) as server:
        found = error(bench, server, api="completions")
        assert "cannot be asked by token ids" in found
        assert "no such address here" in found
        assert bench.run(server, [row("u: q")], api="chat")["by"]["servers"][0]["api"] == "chat"


def test_messages_where_they_are_wanted(bench: Bench) -> None:  # noqa: F811
    with FakeServer(bench.tokenizer) as server:
        report = bench.run(server, [row("u: q")], api="chat")
        assert [path for path, _, _ in server.requests].count("/v1/completions") == 0
    assert report["by"]["servers"][0]["api"] == "chat"


def test_a_template_that_refuses_all_samples(make: Callable[[str], Bench]) -> None:  # noqa: F811
    bench = make("{{ raise_exception('no') }}" + chats.CHATML)  # noqa: F811
    with FakeServer(bench.tokenizer) as server:
        assert "no conversation got an answer" in error(bench, server)


@pytest.mark.parametrize(
    ("endpoint", "why"),
    [
        ("127.0.0.1:8000", "is no address such as"),
        ("ftp://host/v1", "is no address such as"),
        ("http://host/v1?key=a", "is no address such as"),
        ("http://me:sk-secret@host/v1", "must hold no user or key; name an environment variable"),
        ([], "an empty list"),
        (["http://a/v1", "http://a/v1/"], "an address is named twice"),
    ],
)
def test_addresses(endpoint: Any, why: str) -> None:
    with pytest.raises(DraftsmithError, match=f"regenerate.endpoint.*{why}") as raised:
        config.parse({"regenerate": {"endpoint": endpoint}}, "mine")
    assert "sk-secret" not in str(raised.value)


def test_the_config_travels_without_its_address(tmp_path: Path) -> None:
    """A rule's params hold what changes answers; the rest comes from the whole config, as the command takes it."""
    from draftsmith.cli import _config
    from draftsmith.workflow import Plan

    source = tmp_path / "data.jsonl"
    source.write_text(json.dumps(row("u: q")) + "\n")
    values = {"data": {"sources": [{"path": str(source)}]}, "regenerate": {"endpoint": "http://a/v1", "top_k": 3}}
    plan, moved = (
        Plan.of(values | {"regenerate": values["regenerate"] | more}, [])
        for more in ({}, {"endpoint": ["http://b/v1"], "concurrency": 2, "max_tries": 9, "api_key_env": "KEY", "request_timeout": 1})
    )  # fmt: skip
    assert plan.settings("regenerate") == moved.settings("regenerate")
    assert plan.settings("regenerate") != Plan.of(values | {"regenerate": {"top_k": 4}}, []).settings("regenerate")
    for each in (plan, moved):
        assert _config(each.settings("regenerate"), each.whole).regenerate == each.config.regenerate
