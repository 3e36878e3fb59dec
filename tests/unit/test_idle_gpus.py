"""The line about GPUs that nothing of the run would use."""

from __future__ import annotations

import pytest

from draftsmith import idle_gpus


@pytest.mark.parametrize(
    ("gpus", "of_an_engine", "shards", "expected"),
    [
        (8, 1, 1, (1, 8)), (8, 2, 1, (2, 4)), (8, 2, 3, (6, 4)), (9, 2, 3, (6, 4)),
        # All of them work, one is too few for another engine, there is none, or the engine is a CPU's.
        (8, 8, 1, None), (8, 1, 8, None), (8, 2, 4, None), (3, 2, 1, None), (0, 1, 1, None), (8, 0, 1, None),
    ],
)  # fmt: skip
def test_idle_gpus_are_told_with_what_would_use_them(
    gpus: int, of_an_engine: int, shards: int, expected: tuple[int, int] | None
) -> None:
    told = idle_gpus.told(gpus, of_an_engine, shards)
    if expected is None:
        assert told == ""
    else:
        assert told == (
            f"draftsmith: {expected[0]} of {gpus} GPUs work while the target does; DRAFTSMITH_SHARDS={expected[1]} loads it on all of "
            f"them side by side, DRAFTSMITH_TRAIN_GPUS={gpus} trains on all"
        )
