"""Tokens per second with a fixed number of requests in flight, as a server under steady load has them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from typing import Any

# Measured one after the other; their spread tells how steady the machine is.
_WINDOWS = 2
_FEWEST = 8
_WARM_TOKENS = 8


def measure(core: Any, prompts: Sequence[Any], sampling: Any, limit: int) -> list[dict[str, Any]]:
    """Two windows of ``limit`` requests in flight on ``core``, an LLMEngine, after one of a few tokens that does not count.

    Each window answers twice as many requests as are in flight, at least 8, the same ones with and without a draft; where
    there are fewer ``prompts`` they come again. Returns of each window tokens, seconds and the requests that were sent.
    """
    wanted = _requests(limit)
    chosen = [prompts[place % len(prompts)] for place in range(wanted)]
    short = sampling.clone()
    short.max_tokens = _WARM_TOKENS
    window(core, chosen[: 2 * limit], short, limit, "warm-up")
    measured = []
    for number in range(_WINDOWS):
        # What an earlier window has read would be read for nothing now.
        core.reset_prefix_cache()
        measured.append(window(core, chosen, sampling, limit, f"window-{number}"))
    return measured


def tokens(limit: int, answer: float) -> float:
    """Tokens that :func:`measure` makes with ``limit`` requests in flight and answers of ``answer`` tokens, at most."""
    return _WINDOWS * _requests(limit) * answer + 2 * limit * _WARM_TOKENS


def _requests(limit: int) -> int:
    return max(2 * limit, _FEWEST)


def window(core: Any, prompts: Sequence[Any], sampling: Any, limit: int, name: str) -> dict[str, Any]:
    """Answer ``prompts``, never more than ``limit`` at once; the clock stops when fewer are left than can be in flight.

    So that the end, where the batch runs empty, is not taken for the load that was asked for. Answers that are unfinished
    then count with the tokens that they have, and are given up.
    """
    waiting = deque(enumerate(prompts))
    running: dict[str, int] = {}
    finished = 0
    begun = time.perf_counter()
    while True:
        while waiting and len(running) < limit:
            number, prompt = waiting.popleft()
            request = f"{name}-{limit}-{number}"
            core.add_request(request, prompt, seeded(sampling, number))
            running[request] = 0
        if len(running) < limit:
            break
        for output in core.step():
            running[output.request_id] = len(output.outputs[0].token_ids)
            if output.finished:
                finished += running.pop(output.request_id)
    seconds = time.perf_counter() - begun
    tokens = finished + sum(running.values())
    if running:
        core.abort_request(list(running))
        # The engine may have planned one more step for them.
        while core.has_unfinished_requests():
            core.step()
    return {"tokens": tokens, "seconds": round(seconds, 4), "requests": len(prompts)}


def seeded(sampling: Any, number: int) -> Any:
    """``sampling`` with a seed for the prompt ``number`` alone: with one seed for all, every answer would meet the same luck.

    Where it has no seed at all it stays so.
    """
    if sampling.seed is None:
        return sampling
    own = sampling.clone()
    own.seed = number
    return own


def mixed(prompts: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The prompts in turn of their domains, so that a few of them are of all."""
    domains: dict[str, list[dict[str, Any]]] = {}
    for prompt in prompts:
        domains.setdefault(prompt["domain"], []).append(prompt)
    turns = chain.from_iterable(zip_longest(*domains.values()))
    return (prompt for prompt in turns if prompt is not None)
