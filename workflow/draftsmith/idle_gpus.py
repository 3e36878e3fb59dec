"""Which GPUs of one machine a run leaves idle: a model that one of them holds is loaded once unless more is asked for."""

from __future__ import annotations


def told(gpus: int, of_an_engine: int, shards: int | None, training: int | None) -> str:
    """A line that names the variables of the local profile; empty where all ``gpus`` work, or there are none.

    ``of_an_engine`` is engine.tp, 0 on a CPU; ``shards`` are the engines side by side and ``training`` the GPUs that train, each
    None where that is done already.
    """
    if not of_an_engine or not gpus:
        return ""
    parts = []
    if shards is not None and gpus >= (shards + 1) * of_an_engine:
        parts.append(
            f"{shards * of_an_engine} of {gpus} GPUs answer and extract, and DRAFTSMITH_SHARDS={gpus // of_an_engine} loads the target on all"
        )
    if training is not None and training < gpus:
        parts.append(
            f"{training} of {gpus} GPUs train, and DRAFTSMITH_TRAIN_GPUS={gpus} trains on all (train.packs_per_step in the config keeps "
            "the result the same)"
        )
    return f"draftsmith: {'; '.join(parts)}" if parts else ""
