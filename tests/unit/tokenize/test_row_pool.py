"""make_all: order, counts, and when other processes come in."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import chats
from draftsmith.chat import Chat
from draftsmith.config import Tokenize
from draftsmith.conversations import Conversation
from draftsmith.tokenize import row_pool
from draftsmith.tokenize.make_rows import Plan, RowMaker
from draftsmith.tokenize.mask_method import choose
from draftsmith.tokenize.row_cache import RowCache
from draftsmith.tokenize.row_pool import Figures, make_all


class Executor:
    """Stands in for the processes: what is submitted is done at once, the first task when ``ready_after`` more were asked for."""

    started: list[Executor] = []  # noqa: RUF012 (emptied by the fixture)

    def __init__(self, workers: int, context: Any, initializer: Any, initargs: Any) -> None:
        self.workers, self.chunks, self.ended = workers, [], False
        self.maker = RowMaker(initargs[0], chat=_chat())
        self.started.append(self)

    def submit(self, function: Any, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if args:
            self.chunks.append([given.conversation_id for given in args[0]])
            future.set_result([row_pool.pack(self.maker.make(given)) for given in args[0]])
        elif function is row_pool._nothing:
            future.set_result(None)
        return future

    def shutdown(self, cancel_futures: bool) -> None:
        self.ended = True


def _chat() -> Chat:
    return chats.chat(chats.CHATML)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    Executor.started = []
    monkeypatch.setattr(row_pool, "ProcessPoolExecutor", Executor)
    monkeypatch.setattr(row_pool.hardware, "cores", lambda: [0, 1, 2])
    monkeypatch.setattr(row_pool, "_WINDOW", 10)
    monkeypatch.setattr(row_pool, "_CHUNK", 3)
    monkeypatch.setattr(row_pool, "_POOL_FROM", 30)
    monkeypatch.setattr(row_pool, "_BY_THREAD_UP_TO", 0)


def talks(*numbers: int) -> list[Conversation]:
    return [chats.talk(f"what is {number}", "The answer", name=f"{number}") for number in numbers]


def plan() -> Plan:
    method, marks = choose(_chat(), talks(0))
    return Plan(
        {"vocab_size": 320, "fingerprint": "mine", "path": "nowhere"}, Tokenize(min_supervised_tokens=1), method, marks
    )


def run(given: list[Conversation], cache: RowCache | None = None) -> tuple[list[tuple[str, str]], Figures]:
    """Names of the conversations in the order in which they come, each with its text in the row."""
    figures, chat = Figures(), _chat()
    made = [
        (one.conversation_id, chat.decode(made.rows[0].ids))
        for one, made in make_all(given, plan(), chat, cache, figures)
    ]
    return made, figures


def expected(given: list[Conversation]) -> list[tuple[str, str]]:
    texts = [one.messages[0]["content"] for one in given]
    return [
        (one.conversation_id, f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\nThe answer<|im_end|>")
        for one, text in zip(given, texts, strict=True)
    ]


@pytest.mark.parametrize("count", [0, 1, 5, 6, 7, 57])
def test_on_a_few_cores_a_thread_encodes_and_no_process_starts(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_pool, "_BY_THREAD_UP_TO", 3)
    threads: set[str] = set()
    encode = Chat.encode_many
    monkeypatch.setattr(
        Chat, "encode_many", lambda self, texts: threads.add(threading.current_thread().name) or encode(self, texts)
    )
    given = talks(*range(count))
    with RowCache(tmp_path) as cache:
        assert run(given, cache) == (expected(given), Figures(made=count))
    assert Executor.started == []
    assert threads == ({"draftsmith-encoder_0"} if count else set())
    assert "draftsmith-encoder_0" not in {thread.name for thread in threading.enumerate()}
    with RowCache(tmp_path) as cache:
        assert run([*talks(99), *given], cache) == (expected([*talks(99), *given]), Figures(reused=count, made=1))


@pytest.mark.parametrize("template", [chats.QWEN, chats.MISTRAL])
def test_a_template_of_many_renderings_needs_processes(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_pool, "_BY_THREAD_UP_TO", 3)
    family = "mistral" if template == chats.MISTRAL else "chatml"
    monkeypatch.setitem(globals(), "_chat", lambda: chats.chat(template, family))
    assert run(talks(*range(57)))[1] == Figures(made=57)
    assert len(Executor.started) == 1


@pytest.mark.parametrize("count", [0, 1, 10, 29])
def test_a_few_are_made_here(count: int) -> None:
    given = talks(*range(count))
    assert run(given) == (expected(given), Figures(made=count))
    assert Executor.started == []


def test_many_are_made_by_one_process_a_core(tmp_path: Path) -> None:
    given = talks(*range(57))
    with RowCache(tmp_path) as cache:
        assert run(given, cache) == (expected(given), Figures(made=57))
    [executor] = Executor.started
    assert executor.workers == 3
    # They are ready at once when the third window comes, before the first is done.
    assert executor.chunks == [
        [str(number) for number in range(start, min(start + 3, end))]
        for begin, end in ((0, 10), (10, 20), (20, 30), (30, 40), (40, 50), (50, 57))
        for start in range(begin, end, 3)
    ]
    assert executor.ended
    assert len(RowCache(tmp_path)) == 57


def test_on_one_core_nobody_else_comes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_pool.hardware, "cores", lambda: [3])
    given = talks(*range(57))
    assert run(given)[0] == expected(given)
    assert Executor.started == []


def test_until_the_others_are_ready_this_process_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also within a window: of the third, two chunks are made here, and the others make the rest."""
    asked = 0

    def done(self: Future[Any]) -> bool:
        nonlocal asked
        asked += 1
        return asked > 3 * 13

    monkeypatch.setattr(Future, "done", done)
    given = talks(*range(57))
    assert run(given)[0] == expected(given)
    [executor] = Executor.started
    handed = [int(name) for chunk in executor.chunks for name in chunk]
    assert handed == list(range(26, 57))
    assert executor.ended


def test_known_ones_do_not_count_and_nobody_is_asked_for_them(tmp_path: Path) -> None:
    known, new = talks(*range(0, 100, 2)), talks(*range(1, 20, 2))
    with RowCache(tmp_path) as cache:
        run(known, cache)
    Executor.started.clear()
    given = sorted(known + new, key=lambda one: int(one.conversation_id))
    with RowCache(tmp_path) as cache:
        assert run(given, cache) == (expected(given), Figures(reused=50, made=10))
    assert Executor.started == []


def test_the_others_end_when_the_caller_leaves() -> None:
    rows = make_all(talks(*range(57)), plan(), _chat())
    for _ in range(35):
        next(rows)
    [executor] = Executor.started
    assert not executor.ended
    rows.close()
    assert executor.ended


@pytest.mark.parametrize(("characters", "ahead"), [(16384, 30), (1, 3)])
@pytest.mark.parametrize("by_thread", [0, 3])
def test_few_conversations_are_ahead_of_the_caller(
    characters: int, ahead: int, by_thread: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three windows of them; where they are long, of one each."""
    monkeypatch.setattr(row_pool, "_CHARACTERS", characters)
    monkeypatch.setattr(row_pool, "_BY_THREAD_UP_TO", by_thread)
    taken = handed = 0

    def source() -> Any:
        nonlocal taken
        for given in talks(*range(100)):
            taken += 1
            yield given

    for _ in make_all(source(), plan(), _chat()):
        handed += 1
        assert taken <= handed + ahead
    assert handed == 100
