"""The line about GPUs that nothing of the run would use."""

from __future__ import annotations

import pytest

from draftsmith import idle_gpus


def line(gpus: int, of_an_engine: int, shards: int | None, training: int | None) -> tuple[list[str], list[str]]:
    """(numbers told of the engines, numbers told of the training)"""
    told = idle_gpus.told(gpus, of_an_engine, shards, training)
    parts = dict.fromkeys(("extract", "train"), "")
    for part in told.removeprefix("draftsmith: ").split("; ") if told else []:
        parts["extract" if "DRAFTSMITH_SHARDS" in part else "train"] = part
    return tuple(
        [word.strip("s=") for word in part.replace("=", " ").split() if word.isdigit()] for part in parts.values()
    )  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("gpus", "of_an_engine", "shards", "training", "expected"),
    [
        (8, 1, 1, 1, (["1", "8", "8"], ["1", "8", "8"])),
        (8, 2, 1, 8, (["2", "8", "4"], [])),
        (9, 2, 3, 9, (["6", "9", "4"], [])),
        # All extract, one trains; and the same where nothing is left to be extracted, or to be trained.
        (8, 1, 8, 1, ([], ["1", "8", "8"])),
        (8, 1, None, 1, ([], ["1", "8", "8"])),
        (8, 1, 1, None, (["1", "8", "8"], [])),
        # All work, there is none, or the engine is a CPU's; a GPU too few for another engine can train.
        (8, 8, 1, 8, ([], [])), (8, 2, 4, 8, ([], [])), (0, 1, 1, 1, ([], [])), (8, 0, 1, 0, ([], [])), (8, 1, None, None, ([], [])),
        (3, 2, 1, 2, ([], ["2", "3", "3"])),
    ],
)  # fmt: skip
def test_idle_gpus_are_told_with_what_would_use_them(
    gpus: int, of_an_engine: int, shards: int | None, training: int | None, expected: tuple[list[str], list[str]]
) -> None:
    assert line(gpus, of_an_engine, shards, training) == expected
