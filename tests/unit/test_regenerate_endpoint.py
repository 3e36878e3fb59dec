"""regenerate against a server of OpenAI's API: what is sent, what is kept, and what a failure costs."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import chats
from draftsmith import regenerate, tokenize
from draftsmith.config import Config, parse
from draftsmith.errors import DraftsmithError
from draftsmith.regenerate import endpoint
from fake_server import FakeServer
from regenerate_bench import Folder, answer, echo, row

END = 1


class Bench(Folder):
    """The stage with a fake server of its target."""

    def __init__(self, folder: Path, template: str) -> None:
        super().__init__(folder, template, source="somebody/Target", num_layers=8, model_type="llama")

    def config(self, endpoint: Any, dropped: float, **settings: Any) -> Config:
        return parse(
            {
                "data": {"sources": [{"path": str(self.folder / "data.jsonl")}], "max_dropped_fraction": dropped},
                "regenerate": {"enabled": True, "max_tokens": 64, "endpoint": endpoint, "max_tries": 2} | settings,
                "tokenize": {"max_length": 200, "min_supervised_tokens": 1},
                "extract": {"store": str(self.folder / "store")},
                "vocabulary": {"size": None},
            },
            "test",
        )

    def run(self, server: Any, rows: list[dict[str, Any]], dropped: float = 1.0, **settings: Any) -> dict[str, Any]:
        endpoint = server.address if isinstance(server, FakeServer) else server
        return self.answer(self.config(endpoint, dropped, **settings), rows)

    def start(self, server: FakeServer, folder: Path, **settings: Any) -> subprocess.Popen[bytes]:
        """The command as a rule calls it, on the data and the parts of the last run; outputs go to ``folder``."""
        return subprocess.Popen(
            [
                sys.executable, "-m", "draftsmith", "regenerate", "--gpus", "0",
                *("--settings", self.config(server.address, 1.0, **settings).model_dump_json()),
                *("--target", self.folder / "target.json", "--workdir", self.folder / "work"),
                *("--scatteritem", "1-of-1", "--report", folder / "shard.json"),
            ],
            env=os.environ | {"PYTHONPATH": str(Path(regenerate.__file__).parents[2])},
        )  # fmt: skip

    def ledger(self) -> list[dict[str, Any]]:
        files = sorted((self.folder / "work").glob("*/failed-*.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    def stored(self) -> str:
        """All that the stage left, as one text."""
        return "".join(path.read_text() for path in sorted(self.folder.rglob("*")) if path.is_file())


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Bench]:
    def no_engine(*args: Any) -> None:
        raise AssertionError("an engine was to be loaded")

    monkeypatch.setattr(regenerate, "Generator", no_engine)
    monkeypatch.setattr(regenerate.engine, "check_granted", no_engine)
    return lambda template: Bench(tmp_path, template)


@pytest.fixture
def bench(make: Callable[[str], Bench]) -> Bench:
    return make(chats.CHATML)


@pytest.fixture
def server(bench: Bench) -> Iterator[FakeServer]:
    with FakeServer(bench.tokenizer) as running:
        running.reply = echo
        yield running


def test_turn_by_turn_in_token_ids(bench: Bench, server: FakeServer) -> None:
    report = bench.run(server, [
        row("s: be", "u: one", "a: source's", "u: two", "a: source's", id="a", domain="x"),
        row("u: three", "u: four", id="b", split="train"),
    ])  # fmt: skip
    assert bench.texts() == [
        ["s: be", "u: one", "a: to one", "u: two", "a: to two"],
        ["u: three", "a: to three", "u: four", "a: to four"],
    ]
    ids = [[*bench.tokenizer(f"to {word}", add_special_tokens=False)["input_ids"], END] for word in ("one", "two")]
    noted = {"fingerprint": "mine", "finish_reasons": ["stop", "stop"], "token_ids": ids}
    assert noted.items() <= bench.written[0]["generated"].items()
    assert any("to one<|im_end|>\n<|im_start|>user\ntwo" in asked for asked in server.asked)
    assert (report["answers"], report["generated_tokens"]) == (4, report["answer_tokens"])
    assert report["by"] == {"servers": [{"address": server.address, "model": "target", "api": "completions"}]}


def test_what_is_sent(bench: Bench, server: FakeServer) -> None:
    settings = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1, "seed": 3}
    bench.run(server, [row("u: one")], **settings)
    path, sent, headers = server.requests[-1]
    body = dict(sent)
    seed = body.pop("seed")
    assert path == "/v1/completions"
    assert body == {
        "model": "target", "max_tokens": 64, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05,
        "repetition_penalty": 1.1, "stop_token_ids": [END], "return_token_ids": True,
        "prompt": bench.tokenizer("<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)["input_ids"],
    }  # fmt: skip
    assert "authorization" not in headers
    # Each answer has a seed of its own, and the same one when it is asked for anew.
    bench.run(server, [row("u: one", "u: two")], **settings)
    shutil.rmtree(bench.folder / "work")
    bench.run(server, [row("u: one")], **settings)
    first, *later, again = [body["seed"] for _, body, _ in server.requests if body.get("max_tokens", 1) > 1]
    assert first == again == seed
    assert len({seed, *later}) == 3
    # Neutral values are sent too, since vLLM takes what is missing from generation_config.json; greedy needs no seed.
    bench.run(server, [row("u: one")])
    greedy = server.requests[-1][1]
    assert (greedy["temperature"], greedy["top_k"], greedy["min_p"], greedy["repetition_penalty"]) == (
        0.0,
        -1,
        0.0,
        1.0,
    )
    assert "seed" not in greedy


def test_asking_again_sends_nothing(bench: Bench, server: FakeServer) -> None:
    rows = [row(f"u: q{n}") for n in range(5)]
    bench.run(server, rows)
    before, requests = bench.written, len(server.requests)
    report = bench.run(server, rows)
    # Not even to see whether the server is there: one that is not makes no difference.
    assert bench.run("http://127.0.0.1:9/v1", rows)["reused"] == report["reused"] == 5
    assert (len(server.requests), bench.written) == (requests, before)
    generations = server.generations
    bench.run(server, [row("u: new"), *rows[::-1]])
    assert server.generations == generations + 1
    assert [texts[0] for texts in bench.texts()] == ["u: new", "u: q4", "u: q3", "u: q2", "u: q1", "u: q0"]


@pytest.mark.parametrize(
    ("change", "asks"),
    [
        ({"concurrency": 3, "max_tries": 4, "request_timeout": 9.0, "api_key_env": "PATH"}, 0),
        ({"unfinished": "keep"}, 0),
        ({"temperature": 0.5}, 1),
        ({"top_k": 5}, 1),
        ({"min_p": 0.1}, 1),
        ({"seed": 1}, 1),
        ({"model": "target"}, 1),
        ({"api": "completions"}, 1),
    ],
)
def test_what_changes_answers_asks_again(bench: Bench, server: FakeServer, change: dict[str, Any], asks: int) -> None:
    bench.run(server, [row("u: q")])
    with FakeServer(bench.tokenizer) as another:
        bench.run(another, [row("u: q")], **change)
        assert (server.generations, another.generations) == (1, asks)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server_is_asked_again(bench: Bench, server: FakeServer, status: int) -> None:
    server.fault = lambda count, prompt: status if count <= 2 else None
    report = bench.run(server, [row("u: q")], max_tries=3)
    assert (server.generations, report["dropped"], bench.ledger()) == (3, {}, [])


def test_500_for_ever(bench: Bench, server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.fault = lambda count, prompt: 500 if "bad" in prompt else None
    rows = [row("u: bad", id="b"), row("u: good", id="g"), row("u: q", "u: bad", id="late")]
    report = bench.run(server, rows)
    assert report["dropped"] == {"failed": 2}
    assert [texts[-1] for texts in bench.texts()] == ["a: to good"]
    failed = {entry["conversation_id"]: entry for entry in bench.ledger()}
    assert {name: entry["turn"] for name, entry in failed.items()} == {"b": 1, "late": 2}
    assert failed["b"]["error"].startswith(f"{server.address}: InternalServerError: ")
    assert "because of 500" in failed["b"]["error"]
    assert failed["b"]["traceback"].startswith("Traceback (most recent call last):")
    assert {entry["conversation_id"] for entry in report["failed"]} == {"b", "late"}
    told = capsys.readouterr().err
    assert "2 conversations failed, each with its traceback in" in told
    last = [line for line in told.splitlines() if "regenerate: " in line][-1]
    assert "1 conversations with 1 answers" in last
    # Each is asked again, from its first question on, and its entry stays.
    server.fault = lambda count, prompt: None
    assert bench.run(server, rows)["failed"] == []
    assert len(bench.ledger()) == 2


def test_a_server_that_refuses_everything_is_not_asked_for_ever(bench: Bench, server: FakeServer) -> None:
    server.fault = lambda count, prompt: 500
    with pytest.raises(DraftsmithError, match=r"conversations failed, more than data.max_dropped_fraction allows.*500"):
        bench.run(server, [row(f"u: q{n}") for n in range(100)], dropped=0.05, concurrency=2, max_tries=1)
    # Five may fail; the sixth ends it, with at most two in flight.
    assert 6 <= server.generations <= 9


def test_a_question_that_the_server_refuses_is_not_sent_twice(bench: Bench, server: FakeServer) -> None:
    server.fault = lambda count, prompt: 400
    with pytest.raises(DraftsmithError, match="no conversation got an answer"):
        bench.run(server, [row("u: q")], max_tries=5)
    assert server.generations == 1
    assert "BadRequestError" in bench.ledger()[0]["error"]


def test_a_request_that_takes_too_long(bench: Bench, server: FakeServer) -> None:
    server.fault = lambda count, prompt: "hang" if "slow" in prompt else None
    report = bench.run(server, [row("u: slow"), row("u: q")], request_timeout=0.3, max_tries=1)
    assert (report["dropped"], report["kept"]) == ({"failed": 1}, 1)
    assert "APITimeoutError" in bench.ledger()[0]["error"]


def test_a_connection_that_one_question_breaks(bench: Bench, server: FakeServer) -> None:
    """The server is still there, so that the others go on."""
    server.fault = lambda count, prompt: "drop" if "bad" in prompt else None
    report = bench.run(server, [row("u: bad"), *(row(f"u: q{n}") for n in range(6))], concurrency=1)
    assert (report["dropped"], report["kept"]) == ({"failed": 1}, 6)
    assert "APIConnectionError" in bench.ledger()[0]["error"]
    assert "httpx" in bench.ledger()[0]["traceback"], "the cause is part of the traceback"


def test_requests_in_flight_are_bounded(bench: Bench, server: FakeServer) -> None:
    bench.run(server, [row(f"u: q{n}", "u: more") for n in range(40)], concurrency=4)
    assert server.most_at_once == 4


def test_several_servers_share_the_work(bench: Bench, server: FakeServer) -> None:
    with FakeServer(bench.tokenizer) as other:
        report = bench.run([server.address, other.address + "/"], [row(f"u: q{n}") for n in range(40)], concurrency=3)
        assert report["kept"] == server.generations + other.generations == 40
        assert min(server.generations, other.generations) >= 10
        assert [one["address"] for one in report["by"]["servers"]] == [server.address, other.address]


def test_one_of_several_servers_goes_away(bench: Bench, server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(bench.tokenizer) as other:
        other.fault = lambda count, prompt: other.die() if count == 5 else None
        report = bench.run([server.address, other.address], [row(f"u: q{n}") for n in range(40)], concurrency=2)
        assert (report["kept"], report["failed"], other.generations <= 8) == (40, [], True)
    # Those that it was at work on went to the other server.
    assert f"{other.address} does not answer any more" in capsys.readouterr().err
    assert 40 < server.generations + other.generations <= 44


def test_a_server_that_is_back_is_asked_again(
    bench: Bench, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "_LOOK_AGAIN_SECONDS", 0.02)

    said: list[str] = []

    async def until(words: str) -> None:
        while words not in "".join(said):
            await asyncio.sleep(0.01)

    async def until_back() -> None:
        await until("does not answer any more")
        other.how["model"] = "target"
        await until("is back")

    monkeypatch.setattr(endpoint, "log", said.append)
    with FakeServer(bench.tokenizer) as other:

        def fault(count: int, prompt: str) -> str | None:
            # It breaks the connection twice, as a question is tried, and then says that it has no such model.
            if count in (2, 3):
                other.how["model"] = None
                return "drop"
            return None

        other.fault = fault
        server.fault = lambda count, prompt: until_back() if other.generations >= 2 else None
        report = bench.run([server.address, other.address], [row(f"u: q{n}") for n in range(30)], concurrency=1)
    assert (report["kept"], report["failed"]) == (30, [])
    assert [line for line in said if line.endswith("is back")] == [f"regenerate: {other.address} is back"]
    assert other.generations > 5


def test_the_last_server_goes_away(bench: Bench, server: FakeServer) -> None:
    server.fault = lambda count, prompt: server.die() if count == 10 else None
    rows = [row(f"u: q{n}") for n in range(40)]
    with pytest.raises(DraftsmithError, match=r"no server answers any more; start it again and run the same command"):
        bench.run(server, rows, concurrency=2)
    kept = sum(len(part.read_text().splitlines()) for part in (bench.folder / "work").glob("*/part-*.jsonl"))
    assert 5 <= kept <= 10
    with FakeServer(bench.tokenizer) as again:
        assert bench.run(again, rows)["reused"] == kept
        assert again.generations == 40 - kept


def test_sigterm_keeps_what_is_answered(bench: Bench, server: FakeServer) -> None:
    def fault(count: int, prompt: str) -> str | None:
        if count == 8:
            os.kill(os.getpid(), signal.SIGTERM)
        return "hang" if count >= 8 else None

    server.fault = fault
    rows = [row(f"u: q{n}") for n in range(20)]
    with pytest.raises(SystemExit) as ended:
        bench.run(server, rows, concurrency=1)
    assert ended.value.code == 143
    assert not (bench.folder / "out.jsonl").exists()
    server.fault, asked = lambda count, prompt: None, server.generations
    report = bench.run(server, rows)
    assert (report["reused"], server.generations - asked) == (7, 13)


def test_kill_in_the_middle(bench: Bench, server: FakeServer) -> None:
    """The command as a rule calls it is killed once a part is there; the next run asks for the rest alone."""
    server.fault = lambda count, prompt: "hang" if count > 80 else None
    rows = [row(f"u: q{n}") for n in range(100)]
    (bench.folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stage = bench.start(server, bench.folder, concurrency=4)
    parts: list[Path] = []
    while not parts and stage.poll() is None:
        time.sleep(0.05)
        parts = list((bench.folder / "work").glob("*/part-*.jsonl"))
    stage.kill()
    stage.wait()
    kept = sum(len(part.read_text().splitlines()) for part in parts)
    assert kept > 0
    assert not (bench.folder / "out.jsonl").exists()
    server.fault, asked = lambda count, prompt: None, server.generations
    report = bench.run(server, rows)
    assert (report["reused"], server.generations - asked, report["kept"]) == (kept, 100 - kept, 100)


def test_two_runs_at_once(bench: Bench, server: FakeServer) -> None:
    """The second asks while the first is at work on the same folder; each ends well, and a third asks for nothing."""
    rows = [row(f"u: q{n}") for n in range(12)]
    second = bench.folder / "second"
    second.mkdir()
    started: list[subprocess.Popen[bytes]] = []

    async def held() -> None:
        started.append(bench.start(server, second))
        while server.generations < 8 and started[0].poll() is None:
            await asyncio.sleep(0.02)

    server.fault = lambda count, prompt: held() if count == 6 else None
    assert bench.run(server, rows, concurrency=1)["kept"] == 12
    assert started[0].wait(timeout=300) == 0
    assert server.generations > 12
    assert json.loads((second / "shard.json").read_text())["conversations"] == 12
    asked = server.generations
    assert bench.run(server, rows)["reused"] == 12
    assert server.generations == asked


def test_cut_answers(bench: Bench, server: FakeServer) -> None:
    server.reply = lambda prompt: "it is…" if prompt.endswith("q<|im_end|>\n<|im_start|>assistant\n") else "fine"
    rows = [row("u: q", "u: r"), row("u: r", "u: q"), row("u: x")]
    assert bench.run(server, rows)["finish_reasons"] == {"length": 2, "stop": 3}
    assert bench.written[0]["messages"][1] == {"role": "assistant", "content": "it is", "truncated": True}
    assert bench.run(server, rows, unfinished="drop")["shortened"] == {"truncated": 1}
    assert bench.texts() == [["u: r", "a: fine"], ["u: x", "a: fine"]]
    assert bench.run(server, rows, unfinished="drop_conversation")["dropped"] == {"truncated": 2}
    assert bench.texts() == [["u: x", "a: fine"]]


def test_no_key_is_logged_or_stored(
    bench: Bench, server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-very-secret")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-somebody-else")
    monkeypatch.setenv("OPENAI_ORG_ID", "org-of-mine")
    server.how["key"] = "sk-very-secret"
    with pytest.raises(DraftsmithError, match=r"refuses the API key \(HTTP 401\); name the variable"):
        bench.run(server, [row("u: q")])
    # A server that repeats the key in what it says.
    server.fault = lambda count, prompt: 400 if "bad" in prompt else None
    bench.run(server, [row("u: q"), row("u: bad sk-very-secret")], api_key_env="MY_KEY")
    _, _, headers = server.requests[-1]
    assert headers["authorization"] == "Bearer sk-very-secret"
    assert "org-of-mine" not in str(server.requests)
    assert "sk-of-somebody-else" not in str(server.requests)
    (bench.folder / "data.jsonl").unlink()
    assert "sk-very-secret" not in bench.stored() + capsys.readouterr().err
    monkeypatch.setenv("MY_KEY", "sk-wrong")
    with pytest.raises(DraftsmithError, match=r"HTTP 401\); correct what MY_KEY holds") as refused:
        bench.run(server, [row("u: another")], api_key_env="MY_KEY")
    assert "sk-wrong" not in str(refused.value)
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(DraftsmithError, match="MY_KEY: no such environment variable"):
        bench.run(server, [row("u: another")], api_key_env="MY_KEY")


def test_rows_that_are_tokens_already_cannot_be_asked(bench: Bench, server: FakeServer) -> None:
    report = bench.run(server, [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, row("u: q")])
    assert (report["dropped"], report["kept"]) == ({"no_question": 1}, 1)


def spoiling(**what: Any) -> Callable[[str, dict[str, Any]], dict[str, Any]]:
    """Puts something else into the answer to a question with 'bad' in it; a message's keys go into the message."""

    def spoil(prompt: str, answer: dict[str, Any]) -> dict[str, Any]:
        choice = answer["choices"][0]
        if "bad" in prompt:
            messages = {key: value for key, value in what.items() if key in ("content", "reasoning", "tool_calls")}
            choice |= {key: value for key, value in what.items() if key not in messages}
            if messages:
                choice["message"] |= messages
        return answer

    return spoil


def failed_alone(bench: Bench, server: FakeServer) -> str:
    """The error in the ledger of one conversation between two that have answers."""
    report = bench.run(server, [row("u: one"), row("u: bad", id="b"), row("u: two")])
    assert (report["kept"], report["dropped"]) == (2, {"failed": 1})
    assert bench.texts() == [["u: one", "a: to one"], ["u: two", "a: to two"]]
    (entry,) = bench.ledger()
    assert (entry["conversation_id"], entry["turn"]) == ("b", 1)
    return str(entry["error"])


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        (["5", "6"], 'token_ids[0] is "5", no id of the target\'s vocabulary of 320'),
        ([5, 6.0], "token_ids[1] is 6.0, no id"),
        ([5, True], "token_ids[1] is true, no id"),
        ([-1], "token_ids[0] is -1, no id"),
        ([5, 320], "token_ids[1] is 320, no id"),
        ([2**70], f"token_ids[0] is {2**70}, no id"),
        ([None], "token_ids[0] is null, no id"),
        ("56", 'token_ids are no list but "56"'),
        (None, "the answer has no token_ids, which the server gave before"),
    ],
)
def test_token_ids_that_are_none(bench: Bench, server: FakeServer, ids: Any, told: str) -> None:
    server.spoil = spoiling(token_ids=ids)
    assert failed_alone(bench, server).startswith(f"{server.address}: MalformedReply: {told}")


def test_the_last_id_of_the_vocabulary_is_one(bench: Bench, server: FakeServer) -> None:
    server.spoil = spoiling(token_ids=[5, 319, END])
    bench.run(server, [row("u: one"), row("u: bad")])
    assert bench.written[1]["generated"]["token_ids"] == [[5, 319, END]]


@pytest.mark.parametrize("reason", [None, "abort", ["stop"]])
def test_a_request_that_the_server_ends(bench: Bench, server: FakeServer, reason: Any) -> None:
    server.spoil = spoiling(finish_reason=reason)
    assert failed_alone(bench, server) == f"{server.address}: Unfinished: the server ended the request with {reason!r}"
    assert "engine's log" not in bench.ledger()[0]["traceback"]


def test_an_answer_that_is_broken_json(bench: Bench, server: FakeServer) -> None:
    server.spoil = lambda prompt, answer: '{"choices": [' if "bad" in prompt else answer
    assert failed_alone(bench, server).startswith(f"{server.address}: MalformedReply: /completions gave broken JSON (")


# By messages: a server that cannot be asked by token ids.


@pytest.fixture
def talker(bench: Bench) -> Iterator[FakeServer]:
    with FakeServer(bench.tokenizer, token_ids=False) as running:
        running.reply = echo
        yield running


def test_turn_by_turn_in_messages(bench: Bench, talker: FakeServer) -> None:
    report = bench.run(talker, [row("s: be", "u: one", "a: source's", "u: two", id="a")])
    assert bench.texts() == [["s: be", "u: one", "a: to one", "u: two", "a: to two"]]
    assert talker.requests[-1][1]["messages"] == [
        {"role": "system", "content": "be"}, {"role": "user", "content": "one"},
        {"role": "assistant", "content": "to one"}, {"role": "user", "content": "two"},
    ]  # fmt: skip
    assert bench.written[0]["generated"]["finish_reasons"] == ["stop", "stop"]
    assert "token_ids" not in bench.written[0]["generated"]
    assert report["by"]["servers"][0]["api"] == "chat"
    assert report["answer_tokens"] == report["generated_tokens"] > 0
    # The text is encoded by tokenize, as the template shows it.
    out = {name: bench.folder / name for name in ("rows", "prompts", "report")}
    settings = bench.config(None, 0.0)
    settings.tokenize.evaluation_per_domain = 0
    tokenize.run(settings, target=bench.folder / "target.json", conversations=bench.folder / "out.jsonl", **out)
    import pandas as pd

    (ids,) = pd.read_parquet(out["rows"]).input_ids
    assert bench.tokenizer.decode(ids).endswith("user\ntwo<|im_end|>\n<|im_start|>assistant\nto two<|im_end|>")


def test_a_server_of_openais_own_arguments_alone(bench: Bench) -> None:
    with FakeServer(bench.tokenizer, token_ids=False, extended=False, tokenize=False) as plain:
        bench.run(plain, [row("u: q")], temperature=0.5)
        assert set(plain.requests[-1][1]) == {"model", "max_tokens", "temperature", "top_p", "seed", "messages"}
        with pytest.raises(DraftsmithError, match=r"refuses the settings of `regenerate`.*unknown argument top_k"):
            bench.run(plain, [row("u: q")], top_k=5)


def test_template_arguments_go_along(bench: Bench, talker: FakeServer) -> None:
    config = bench.config(talker.address, 0.0)
    config.tokenize.template_args = {"enable_thinking": False}
    (bench.folder / "data.jsonl").write_text(json.dumps(row("u: q")) + "\n")
    answer(config, bench.folder, bench.folder / "out.jsonl", bench.folder / "out.json")
    sent = [
        body.get("chat_template_kwargs")
        for path, body, _ in talker.requests
        if path != "/v1/models" and "prompt" not in body
    ]
    assert set(map(str, sent)) == {"{'enable_thinking': False}"}


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_kept_apart(make: Callable[[str], Bench], name: str) -> None:
    bench = make(chats.QWEN)
    with FakeServer(bench.tokenizer, token_ids=False) as talker:
        talker.reply = lambda prompt: {"content": "fine", name: "hm"}
        bench.run(talker, [row("u: q", "u: r")])
        assert bench.written[0]["messages"][1] == {"role": "assistant", "content": "fine", "reasoning_content": "hm"}
        # As it is served, the next prompt has the answer without the reasoning.
        assert talker.asked[1].startswith("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nfine<|im_end|>")


def test_tool_calls_and_the_sources_replies(make: Callable[[str], Bench]) -> None:
    template = chats.CHATML.replace(
        "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls or [] %}CALL {{ c.function.name }}{% endfor %}"
    )
    bench = make(template)
    source = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "s1", "type": "function", "function": {"name": "sky", "arguments": "{}"}}]},
        {"role": "tool", "content": "blue", "tool_call_id": "s1"},
        {"role": "assistant", "content": "so"},
    ]  # fmt: skip
    tools = [{"type": "function", "function": {"name": "sky", "parameters": {"type": "object", "properties": {}}}}]
    call = {"id": "t7", "type": "function", "function": {"name": "sky", "arguments": '{"of": "Rome"}'}}
    with FakeServer(bench.tokenizer, token_ids=False) as talker:
        talker.reply = lambda prompt: "It is blue." if "blue" in prompt else {"content": None, "tool_calls": [call]}
        report = bench.run(talker, [{"messages": source, "tools": tools}])
    parsed = {"id": "t7", "type": "function", "function": {"name": "sky", "arguments": {"of": "Rome"}}}
    assert bench.written[0]["messages"] == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [parsed]},
        {"role": "tool", "content": "blue", "tool_call_id": "t7"},
        {"role": "assistant", "content": "It is blue."},
    ]
    assert report["finish_reasons"] == {"tool_calls": 1, "stop": 1}
    # The call goes back in OpenAI's shape, with its arguments as text.
    sent = talker.requests[-1][1]
    assert sent["messages"][1]["tool_calls"] == [call]
    assert sent["tools"] == tools


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ({"content": {"text": "x"}}, 'content is neither a text nor a list of parts but {"text": "x"}'),
        ({"content": 7}, "content is neither a text nor a list of parts but 7"),
        ({"content": [{"type": "image_url", "image_url": {}}]}, 'a part of content is no text: {"type": "image_url"'),
        ({"content": [{"type": "text", "text": None}]}, "a part of content is no text"),
        ({"content": [{"type": ["text"]}]}, "a part of content is no text"),
        ({"content": [None]}, "a part of content is no text: null"),
        ({"reasoning": ["hm"]}, 'the answer\'s reasoning is no text but ["hm"]'),
        ({"tool_calls": {"name": "sky"}}, "tool_calls are no list of function calls"),
        ({"tool_calls": [{"function": {"arguments": "{}"}}]}, "tool_calls are no list of function calls"),
        ({"tool_calls": [{"function": {"name": "sky", "arguments": [1]}}]}, "tool_calls are no list of function calls"),
        ({"message": "to bad"}, "the answer has no message"),
        ({"token_ids": ["5"]}, 'token_ids[0] is "5", no id'),
    ],
)
def test_messages_that_are_none(bench: Bench, talker: FakeServer, what: dict[str, Any], told: str) -> None:
    talker.spoil = spoiling(**what)
    assert failed_alone(bench, talker).startswith(f"{talker.address}: MalformedReply: {told}")


def test_an_odd_usage_costs_no_answer(bench: Bench, talker: FakeServer) -> None:
    talker.spoil = lambda prompt, answer: answer | {"usage": "many" if "bad" in prompt else {"completion_tokens": 3}}
    report = bench.run(talker, [row("u: one"), row("u: bad")])
    assert (report["kept"], report["generated_tokens"]) == (2, 3)


def test_a_content_of_several_parts(make: Callable[[str], Bench]) -> None:
    bench = make(chats.QWEN)
    parts = ["It is", {"type": "output_text", "text": ""}, {"type": "text", "text": "blue."}]
    with FakeServer(bench.tokenizer, token_ids=False) as talker:
        talker.reply = echo
        talker.spoil = spoiling(content=[{"type": "thinking", "thinking": "hm"}, *parts])
        bench.run(talker, [row("u: one"), row("u: bad", "u: go on")])
        assert bench.written[1]["messages"] == [
            {"role": "user", "content": "bad"},
            {"role": "assistant", "content": "It is\nblue.", "reasoning_content": "hm"},
            {"role": "user", "content": "go on"},
            {"role": "assistant", "content": "It is\nblue.", "reasoning_content": "hm"},
        ]
        assert any(
            asked.endswith(
                "assistant\nIt is\nblue.<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
            )
            for asked in talker.asked
        )


def test_arguments_that_are_an_object_already(bench: Bench, talker: FakeServer) -> None:
    talker.spoil = spoiling(content=None, tool_calls=[{"function": {"name": "sky", "arguments": {"of": "Rome"}}}])
    bench.run(talker, [row("u: one"), row("u: bad")])
    assert bench.written[1]["messages"][1]["tool_calls"] == [
        {"type": "function", "function": {"name": "sky", "arguments": {"of": "Rome"}}}
    ]


@pytest.mark.parametrize("arguments", ["{", "[" * 100_000])
def test_arguments_that_are_no_json(bench: Bench, talker: FakeServer, arguments: str) -> None:
    talker.spoil = spoiling(content=None, tool_calls=[{"function": {"name": "sky", "arguments": arguments}}])
    report = bench.run(talker, [row("u: one"), row("u: bad")])
    assert (report["kept"], report["dropped"]) == (1, {"bad_tools": 1})
