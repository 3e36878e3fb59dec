"""Several processes, as on several GPUs, but over gloo."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftsmith import train_draft
from draftsmith.errors import DraftsmithError
from draftsmith.files import read_json
from draftsmith.train_draft import ranks


def _fail_on_rank_1(folder: Path) -> None:
    if ranks.rank() == 1:
        raise DraftsmithError("rank 1 has no luck")
    time.sleep(60)


def _write_rank(folder: Path) -> None:
    (folder / f"{ranks.rank()}-of-{ranks.world_size()}-{os.environ['LOCAL_RANK']}").touch()


def _wait_for_term(folder: Path) -> None:
    signal.signal(signal.SIGTERM, lambda *_: (folder / f"left-{ranks.rank()}").touch() or os._exit(143))
    (folder / f"up-{ranks.rank()}").touch()
    time.sleep(60)


def test_two_processes_train_as_one(make_run: Callable[..., Any]) -> None:
    """Two processes of one pack a step and one process of two: the same packs, losses and accuracies, step by step."""
    run = make_run()
    settings = {"max_steps": 4, "eval_steps": 2}
    alone = run.train("alone", gradient_accumulation=2, **settings)
    together = run.paths("together", "work-together")
    ranks.run_on_all(2, train_draft._train, {"config": run.config(**settings), **together})
    report = read_json(together["report"])
    assert report["world_size"] == 2
    assert report["tokens"] == alone["tokens"]
    assert len(report["history"]) == len(alone["history"]) == 5
    for one, other in zip(report["history"], alone["history"], strict=True):
        for name in ("loss", "grad_norm", "accuracy", "eval_loss", "eval_accuracy", "eval_acceptance_length"):
            if name in other:
                assert one[name] == pytest.approx(other[name], abs=1e-4), name


def test_environment_of_each_process(tmp_path: Path) -> None:
    ranks.run_on_all(2, _write_rank, {"folder": tmp_path})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-of-2-0", "1-of-2-1"]


def test_one_that_fails_ends_the_others(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(DraftsmithError, match="exit codes"):
        ranks.run_on_all(2, _fail_on_rank_1, {"folder": tmp_path})
    assert time.monotonic() - started < 20


def test_sigterm_is_passed_on(tmp_path: Path) -> None:
    def terminate() -> None:
        deadline = time.monotonic() + 30
        while len(list(tmp_path.glob("up-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=terminate).start()
    with pytest.raises(SystemExit) as ended:
        ranks.run_on_all(2, _wait_for_term, {"folder": tmp_path})
    assert ended.value.code == 143
    assert sorted(path.name for path in tmp_path.glob("left-*")) == ["left-0", "left-1"]
