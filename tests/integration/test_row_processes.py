"""tokenize's own processes, as they are started in a run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import chats
from draftsmith.chat import Chat
from draftsmith.config import Tokenize
from draftsmith.tokenize import row_pool
from draftsmith.tokenize.make_rows import Made, Plan, RowMaker
from draftsmith.tokenize.mask_method import choose
from environment import shell


def test_they_make_what_this_one_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chats.fast(chats.CHATML).save_pretrained(tmp_path)
    target = {"path": str(tmp_path), "trust_remote_code": False, "vocab_size": 320, "fingerprint": "mine"}
    settings = Tokenize(min_supervised_tokens=1)
    talks = [chats.talk(f"what is {number}", "The answer", "so", "It is 3.", name=f"{number}") for number in range(300)]
    chat = Chat.load(target, {})
    plan = Plan(target, settings, *choose(chat, talks[:4]))
    alone = [made.rows[0] for _, made in row_pool.make_all(talks, plan, chat)]

    class Waiting(RowMaker):
        """In this process: makes one conversation, once the others are ready."""

        def make(self, conversation: object) -> Made:
            [pool] = pools
            deadline = time.monotonic() + 120
            while not any(first.done() for first in pool._first):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            return super().make(conversation)

    pools: list[row_pool._Pool] = []
    start = row_pool._Pool.start
    monkeypatch.setattr(row_pool._Pool, "start", lambda self: (pools.append(self), start(self)))
    monkeypatch.setattr(row_pool, "RowMaker", Waiting)
    monkeypatch.setattr(row_pool, "_POOL_FROM", 300)
    monkeypatch.setattr(row_pool, "_BY_THREAD_UP_TO", 0)
    monkeypatch.setattr(row_pool.hardware, "cores", lambda: [0, 1])
    together = [made.rows[0] for _, made in row_pool.make_all(talks, plan, chat)]
    assert [(row.ids.tolist(), row.spans, row.cut) for row in together] == [
        (row.ids.tolist(), row.spans, row.cut) for row in alone
    ]


def test_they_end_with_the_run_that_started_them(tmp_path: Path) -> None:
    """However it ends: a killed one cannot tell them."""
    # A template that may rewrite history, for which processes are started on two cores too.
    chats.fast(chats.QWEN).save_pretrained(tmp_path / "model")
    target = {"path": str(tmp_path / "model"), "trust_remote_code": False, "vocab_size": 320, "fingerprint": "mine"}
    (tmp_path / "target.json").write_text(json.dumps(target))
    # Enough for the processes to be ready before the end.
    with open(tmp_path / "data.jsonl", "w") as file:
        for number in range(60000):
            messages = [
                {"role": "user", "content": f"{number} " + "word " * 200},
                {"role": "assistant", "content": "Yes, yes."},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    settings = {"data": {"sources": [{"path": str(tmp_path / "data.jsonl")}]}, "tokenize": {"evaluation_per_domain": 0}}
    names = {name: str(tmp_path / f"out.{name}") for name in ("rows", "prompts", "report")}
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "draftsmith", "tokenize", "--settings", json.dumps(settings), "--target",
                str(tmp_path / "target.json"), *(part for name, path in names.items() for part in (f"--{name}", path)),
            ],
            stderr=log, env=shell() | {"CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip
    deadline = time.monotonic() + 120
    below: list[psutil.Process] = []
    # The tracker of resources, the server, and at least one process that makes rows.
    while len(below) < 3:
        assert process.poll() is None, (tmp_path / "log").read_text()
        assert time.monotonic() < deadline
        below = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.1)
    time.sleep(1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(below, 30)
    assert alive == []
    assert not (tmp_path / "out.rows").exists()
