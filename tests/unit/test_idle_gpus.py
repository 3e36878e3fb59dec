"""The line about GPUs that nothing of the run would use."""

from __future__ import annotations

import pytest

from draftsmith import idle_gpus

ENGINES = "{} of {} GPUs answer and extract, and DRAFTSMITH_SHARDS={} loads the target on all"
TRAINING = "{} of {} GPUs train, and DRAFTSMITH_TRAIN_GPUS={} trains on all (train.packs_per_step in the config keeps the result the same)"


@pytest.mark.parametrize(
    ("gpus", "of_an_engine", "shards", "training", "expected"),
    [
        (8, 1, 1, 1, [ENGINES.format(1, 8, 8), TRAINING.format(1, 8, 8)]),
        (8, 2, 1, 8, [ENGINES.format(2, 8, 4)]),
        (9, 2, 3, 9, [ENGINES.format(6, 9, 4)]),
        # All extract, one trains; and the same where nothing is left to be extracted, or to be trained.
        (8, 1, 8, 1, [TRAINING.format(1, 8, 8)]),
        (8, 1, None, 1, [TRAINING.format(1, 8, 8)]),
        (8, 1, 1, None, [ENGINES.format(1, 8, 8)]),
        # A GPU too few for another engine can train.
        (3, 2, 1, 2, [TRAINING.format(2, 3, 3)]),
        # All work, there is none, or the engine is a CPU's.
        (8, 8, 1, 8, []), (8, 2, 4, 8, []), (0, 1, 1, 1, []), (8, 0, 1, 0, []), (8, 1, None, None, []),
    ],
)  # fmt: skip
def test_idle_gpus_are_told_with_what_would_use_them(
    gpus: int, of_an_engine: int, shards: int | None, training: int | None, expected: list[str]
) -> None:
    told = idle_gpus.told(gpus, of_an_engine, shards, training)
    assert told == ("draftsmith: " + "; ".join(expected) if expected else "")
