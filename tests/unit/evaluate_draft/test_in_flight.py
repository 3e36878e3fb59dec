"""The load that is measured: never more requests than asked for, and no clock that runs while the batch runs empty."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from draftsmith.evaluate_draft import in_flight


class Core:
    """An engine in which a step takes a second and gives each request a token, of as many as its prompt says."""

    def __init__(self) -> None:
        self.now = 0.0
        self.running: dict[str, list[int]] = {}
        self.most, self.sent, self.resets = 0, 0, 0
        self.aborted: list[str] = []
        self.seeds: list[int] = []

    def add_request(self, name: str, prompt: int, sampling: Any) -> None:
        assert name not in self.running
        self.seeds.append(sampling.seed)
        self.running[name] = [0, min(prompt, sampling.max_tokens)]
        self.sent += 1

    def step(self) -> list[Any]:
        self.now += 1.0
        self.most = max(self.most, len(self.running))
        outputs = []
        for name, tokens in list(self.running.items()):
            tokens[0] += 1
            finished = tokens[0] == tokens[1]
            answer = SimpleNamespace(token_ids=[7] * tokens[0])
            outputs.append(SimpleNamespace(request_id=name, outputs=[answer], finished=finished))
            if finished:
                del self.running[name]
        return outputs

    def abort_request(self, names: list[str]) -> None:
        self.aborted += names
        for name in names:
            del self.running[name]

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def reset_prefix_cache(self) -> bool:
        assert not self.running
        self.resets += 1
        return True


class Sampling(SimpleNamespace):
    def clone(self) -> Sampling:
        return Sampling(**vars(self))


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Core:
    made = Core()
    monkeypatch.setattr(time, "perf_counter", lambda: made.now)
    return made


def test_the_clock_stops_when_the_batch_can_no_longer_be_full(core: Core) -> None:
    """Two in flight: 1 and 2 to second 3 and 5; 3 from 3 to 7; 4 from 5. At 7 nobody waits: 3 + 5 + 4 and two of the fourth's ten."""
    told = in_flight.window(core, [3, 5, 4, 10], Sampling(max_tokens=99, seed=0), 2, "a")
    assert told == {"tokens": 14, "seconds": 7.0, "requests": 4}
    assert (core.most, core.aborted) == (2, ["a-2-3"])
    assert not core.has_unfinished_requests()


def test_one_at_a_time_counts_every_token(core: Core) -> None:
    told = in_flight.window(core, [3, 5], Sampling(max_tokens=4, seed=0), 1, "a")
    assert told == {"tokens": 7, "seconds": 7.0, "requests": 2}
    assert (core.most, core.aborted) == (1, [])
    assert core.seeds == [0, 1], "no two answers meet the same luck"


def test_without_a_seed_none_is_made(core: Core) -> None:
    """vLLM's CPU backend fails on a request's own seed."""
    in_flight.window(core, [3, 5], Sampling(max_tokens=4, seed=None), 1, "a")
    assert core.seeds == [None, None]


def test_the_warm_up_is_not_counted_and_prompts_come_again(core: Core) -> None:
    sampling = Sampling(max_tokens=20, seed=0)
    windows = in_flight.measure(core, [20, 20, 20], sampling, 6)
    # Six at a time, twice: twelve answers of twenty tokens in forty seconds.
    assert windows == [{"tokens": 240, "seconds": 40.0, "requests": 12}] * 2
    assert core.now == 2 * 8 + 2 * 40
    assert core.sent == 12 + 2 * 12
    assert core.most == 6
    assert core.resets == 2, "once before each window"
    assert sampling.max_tokens == 20


def test_a_few_prompts_are_of_all_domains() -> None:
    prompts = [{"domain": domain, "n": n} for domain, n in (("a", 1), ("a", 2), ("a", 3), ("b", 4), ("c", 5), ("c", 6))]
    assert [prompt["n"] for prompt in in_flight.mixed(prompts)] == [1, 4, 5, 2, 6, 3]
