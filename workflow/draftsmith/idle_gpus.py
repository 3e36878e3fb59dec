"""Which GPUs of one machine a run leaves idle: a model that one of them holds is loaded once unless more is asked for."""

from __future__ import annotations


def told(gpus: int, of_an_engine: int, shards: int) -> str:
    """A line that names the variables of the local profile; empty where the shards' engines take all ``gpus``, or there are none.

    ``of_an_engine`` is engine.tp, 0 on a CPU.
    """
    if not of_an_engine or gpus < (shards + 1) * of_an_engine:
        return ""
    return (
        f"draftsmith: {shards * of_an_engine} of {gpus} GPUs work while the target does; DRAFTSMITH_SHARDS={gpus // of_an_engine} loads it on "
        f"all of them side by side, DRAFTSMITH_TRAIN_GPUS={gpus} trains on all"
    )
