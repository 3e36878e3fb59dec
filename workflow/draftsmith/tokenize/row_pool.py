"""Rows of many conversations: those of earlier runs from the cache, the others made in one of two ways.

Where most of the time goes to a fast tokenizer, a thread encodes a few dozen conversations while this process makes rows of
those before them. Where many renderings or a slow tokenizer take the time, which Python does one after the other, or where
there are many cores, processes do the work, one a core.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain

from draftsmith import hardware
from draftsmith.chat import Chat, Encoded
from draftsmith.conversations import Conversation
from draftsmith.conversations.reading import Given
from draftsmith.log import log
from draftsmith.processes import Identity, driver_watch, this
from draftsmith.tokenize import row_identity
from draftsmith.tokenize.make_rows import Begun, Made, Plan, RowMaker
from draftsmith.tokenize.packed_rows import Packed, pack, unpack
from draftsmith.tokenize.row_cache import RowCache

# Conversations that are looked up together; those among them that are new are made together, in chunks.
_WINDOW = 1024
_CHUNK = 32
# Of conversations that have more of them, fewer are taken together.
_CHARACTERS = 16384
# Windows that are being made while the one before them is handed on.
_AHEAD = 2
# With more cores, one process's Python is what the others would wait for. With fewer, processes cost more than they bring,
# if encoding is most of the work: that is the case for templates that need one rendering, and fast tokenizers.
_BY_THREAD_UP_TO = 4
# New conversations from which on other processes are worth their start; this process goes on until they are ready.
_POOL_FROM = 2048
# Not forked from here: a tokenizer that has run has threads, whose locks a fork would copy as they are. A server without
# any imports once what all of its forks need.
_START = "forkserver"
_PRELOAD = ["draftsmith.tokenize.row_worker_imports"]


@dataclass
class Figures:
    """Conversations whose rows were ``reused`` from earlier runs, and those that were ``made``."""

    reused: int = 0
    made: int = 0


@dataclass
class _Window:
    """Conversations in order, what is known of each, places of new ones that nobody makes yet, and who makes the others."""

    given: list[Given]
    keys: list[bytes | None]
    packed: list[Packed | None]
    new: deque[int]
    futures: list[Future[list[Packed]] | _Encoding] = field(default_factory=list)

    def take(self) -> list[Given]:
        """The next new ones, as many as are made together; from now on somebody makes them."""
        return [self.given[self.new.popleft()] for _ in range(min(_CHUNK, len(self.new)))]


def make_all(
    conversations: Iterable[Given],
    plan: Plan,
    chat: Chat,
    cache: RowCache | None = None,
    figures: Figures | None = None,
) -> Iterator[tuple[Given, Made]]:
    """Each conversation with what became of it, in order.

    What ``cache`` has is taken from it, and what is made is added to it. No more than a few windows of conversations are
    in memory at once.
    """
    figures = figures or Figures()
    source, ahead = iter(conversations), deque[_Window]()
    maker, cores = RowMaker(plan, chat), len(hardware.cores())
    by_thread = maker.fast and cores <= _BY_THREAD_UP_TO
    pool: _Pool | _Thread = _Thread(maker) if by_thread else _Pool(plan)
    # What is encoded takes a hundred bytes a token.
    size = 2 * _CHUNK if by_thread else max(_WINDOW, _CHUNK * cores)
    try:
        while (given := _next(source, size)) or ahead:
            if given:
                window = _look_up(given, plan, cache)
                figures.reused += len(given) - len(window.new)
                figures.made += len(window.new)
                ahead.append(window)
                if figures.made >= _POOL_FROM:
                    pool.start()
            pool.submit(ahead)
            if len(ahead) > _AHEAD or not given:
                yield from _finish(ahead, maker, cache, pool)
    finally:
        pool.end()


def _next(source: Iterator[Given], size: int) -> list[Given]:
    """The next conversations, ``size`` or fewer long ones."""
    taken: list[Given] = []
    characters = 0
    while len(taken) < size and characters < size * _CHARACTERS and (one := next(source, None)) is not None:
        taken.append(one)
        characters += sum(len(message["content"]) for message in one.messages) if isinstance(one, Conversation) else 0
    return taken


def _look_up(given: list[Given], plan: Plan, cache: RowCache | None) -> _Window:
    keys: list[bytes | None] = [None] * len(given)
    packed: list[Packed | None] = [None] * len(given)
    if cache is not None:
        for place, one in enumerate(given):
            # Rows that are tokens already would only be copied.
            if isinstance(one, Conversation):
                key = keys[place] = row_identity.key(one, plan.target["fingerprint"])
                packed[place] = cache.get(key)
    return _Window(given, keys, packed, deque(place for place, one in enumerate(packed) if one is None))


def _finish(
    ahead: deque[_Window], maker: RowMaker, cache: RowCache | None, pool: _Pool | _Thread
) -> Iterator[tuple[Given, Made]]:
    """Hand the first window on; what the pool was not ready to take is made here."""
    window = ahead[0]
    here = deque[Packed]()
    theirs: Iterator[Packed] | None = None
    for place, one in enumerate(window.given):
        packed = window.packed[place]
        if packed is None:
            key = window.keys[place]
            if not here and not window.futures:
                pool.submit(ahead)
            if not here and not window.futures:
                here.extend(pack(made) for made in maker.make_together(window.take()))
            if here:
                packed = here.popleft()
            else:
                theirs = theirs or chain.from_iterable(future.result() for future in window.futures)
                packed = next(theirs)
            if cache is not None and key is not None:
                cache.add(key, packed)
        yield one, unpack(packed)
    ahead.popleft()


@dataclass
class _Encoding:
    """A few conversations that are being encoded; the rest is made when their rows are asked for."""

    maker: RowMaker
    begun: Begun
    encoded: Future[dict[str, Encoded]]

    def result(self) -> list[Packed]:
        """The rows of each."""
        return [pack(made) for made in self.maker.end(self.begun, self.encoded.result())]


class _Thread:
    """Encodes beside this process's other work, in a thread that does not hold Python: no process has to start for it."""

    def __init__(self, maker: RowMaker) -> None:
        self._maker, self._executor = maker, ThreadPoolExecutor(1, "draftsmith-encoder")

    def start(self) -> None:
        """Nothing has to be started."""

    def submit(self, windows: Iterable[_Window]) -> None:
        """Begin what is new in ``windows`` and has not been begun."""
        for window in windows:
            while window.new:
                begun = self._maker.begin(window.take())
                window.futures.append(_Encoding(self._maker, begun, self._executor.submit(self._maker.encode, begun)))

    def end(self) -> None:
        """Let the thread end; what it has not begun is dropped."""
        self._executor.shutdown(cancel_futures=True)


class _Pool:
    """Processes that make rows, one a core; none before :meth:`start`, and none on a single core."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._executor: ProcessPoolExecutor | None = None
        self._first: list[Future[None]] = []

    def start(self) -> None:
        """Let the processes start while this one goes on."""
        workers = len(hardware.cores())
        if self._executor is not None or workers < 2:
            return
        log(f"tokenize: {workers} processes")
        context = multiprocessing.get_context(_START)
        if _START == "forkserver":
            context.set_forkserver_preload(_PRELOAD)
        self._executor = ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(self._plan, this()))
        # Each task that finds no process idle has one started.
        self._first = [self._executor.submit(_nothing) for _ in range(workers)]

    def submit(self, windows: Iterable[_Window]) -> None:
        """Once a process is ready, let it make what is new in ``windows`` and has not been asked for."""
        if self._executor is None or not any(first.done() for first in self._first):
            return
        for window in windows:
            while window.new:
                window.futures.append(self._executor.submit(_make_chunk, window.take()))

    def end(self) -> None:
        """Let the processes end; what they have not begun is dropped."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)


_maker: RowMaker | None = None


def _begin(plan: Plan, driver: Identity) -> None:
    global _maker
    # Not the parent: the server from which this process was forked ends only after it.
    driver_watch.follow(driver)
    _maker = RowMaker(plan)


def _nothing() -> None:
    """The first task, done when a process has begun."""


def _make_chunk(chunk: list[Given]) -> list[Packed]:
    assert _maker is not None
    return [pack(made) for made in _maker.make_together(chunk)]
