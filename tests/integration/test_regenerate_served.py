"""The target in this process and the same target behind `vllm serve`: equal greedy answers, token by token."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import tiny
from draftsmith.config import parse
from draftsmith.errors import DraftsmithError
from environment import shell
from regenerate_bench import answer

SECONDS = 600
QUESTIONS = [["Hello"], ["What is it?", "And then?"], ["1 + 1?", "2 + 2?", "3 + 3?"], ["Once upon a time"]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that often ends its turn: every answer of another length."""
    folder = tiny.model(tmp_path_factory.mktemp("served") / "target", num_hidden_layers=2)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][2] *= 3.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    # What a server would take for the settings that a request does not name.
    generation = {"eos_token_id": 2, "do_sample": True, "temperature": 0.9, "top_k": 3, "repetition_penalty": 1.4}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of `vllm serve`, on a port that was free."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("log") / "serve.log"
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "float32", "--max-model-len", "320", "--enforce-eager", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(1 << 27),
    ]  # fmt: skip
    environment = shell() | {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with open(log, "w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
    try:
        end = time.monotonic() + SECONDS
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
                break
            except OSError:
                assert server.poll() is None, log.read_text()[-4000:]
                assert time.monotonic() < end, log.read_text()[-4000:]
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(timeout=30)
        # Its own session: what is left of the engine goes with it.
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)


def ask(
    folder: Path, model: Path, name: str, template_args: dict[str, Any] | None = None, **settings: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The conversations that the stage writes, and its report."""
    data = folder / "data.jsonl"
    rows = [
        {"id": str(n), "messages": [{"role": "user", "content": text} for text in texts]}
        for n, texts in enumerate(QUESTIONS)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = parse(
        {
            # A random model ends some turns before it has said anything.
            "data": {"sources": [{"path": str(data)}], "max_dropped_fraction": 0.5},
            "regenerate": {"enabled": True, "max_tokens": 24} | settings,
            "tokenize": {"max_length": 296, "template_args": template_args or {}},
            "engine": {"max_num_seqs": 8, "max_num_batched_tokens": 512, "kv_cache_gib": 0.125},
        },
        "test",
    )
    (folder / "target.json").write_text(json.dumps(tiny.target(model)))
    out, report = folder / f"{name}.jsonl", folder / f"{name}.json"
    answer(config, folder, out, report)
    return [json.loads(line) for line in out.read_text().splitlines()], json.loads(report.read_text())


def test_engine_and_server_answer_alike(model: Path, served: str, tmp_path: Path) -> None:
    by_server, report = ask(tmp_path, model, "server", endpoint=served)
    assert report["by"]["servers"] == [{"address": served, "model": str(model), "api": "completions"}]
    by_engine, _ = ask(tmp_path, model, "engine")
    assert [row["generated"] for row in by_server] == [row["generated"] for row in by_engine]
    assert [row["messages"] for row in by_server] == [row["messages"] for row in by_engine]
    ids = [answer for row in by_server for answer in row["generated"]["token_ids"]]
    assert len(ids) >= 4
    assert all(0 < len(answer) <= 24 for answer in ids)
    assert len({len(answer) for answer in ids}) > 2, "the answers differ from each other"
    assert any(answer[-1] == 2 for answer in ids), "some end by themselves"
    by_messages, report = ask(tmp_path, model, "messages", endpoint=served, api="chat")
    assert report["by"]["servers"][0]["api"] == "chat"
    # Of the first turns: behind them stands a random model's text, which no message can hold to the byte.
    first = [row["generated"]["token_ids"][0] for row in by_engine]
    assert [row["generated"]["token_ids"][0] for row in by_messages] == first


def test_a_seed_gives_the_same_answer_again(model: Path, served: str, tmp_path: Path) -> None:
    settings = {"endpoint": served, "temperature": 1.0, "top_k": 50, "min_p": 0.01, "max_tokens": 12}
    answers = []
    for name, seed in (("one", 0), ("again", 0), ("other", 1)):
        folder = tmp_path / name
        folder.mkdir()
        rows, _ = ask(folder, model, name, seed=seed, **settings)
        answers.append([row["generated"]["token_ids"] for row in rows])
    assert answers[0] == answers[1] != answers[2]


def test_another_template_is_seen_by_the_real_server(model: Path, served: str, tmp_path: Path) -> None:
    other = tiny.model(tmp_path / "target", num_hidden_layers=2)
    template = other / "chat_template.jinja"
    template.write_text(template.read_text().replace("assistant\n{% endif %}", "assistant\n\n{% endif %}"))
    assert template.read_text() != (model / "chat_template.jinja").read_text()
    with pytest.raises(DraftsmithError, match=r"renders the prompt of conversation 0 in another way"):
        ask(tmp_path, other, "other", endpoint=served)


def test_a_context_that_is_too_short_for_the_settings(model: Path, served: str, tmp_path: Path) -> None:
    with pytest.raises(DraftsmithError, match=r"context is 320 tokens.*need 396 together"):
        ask(tmp_path, model, "long", endpoint=served, max_tokens=100)
