"""vLLM's own worker, with every error put on record by the process in which it happened.

vLLM sends the driver only an error's text, which is empty for a bare ``assert``, and at tensor parallelism the driver reads
the first rank first, which hangs when another one failed. The record says type, traceback, rank, stage and rows; the
driver finds it in the folder that the environment names.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from draftsmith.extract_shard import ledger
from draftsmith.processes.followed_worker import FollowedWorker

STAGES = {
    "init_device": "start",
    "load_model": "load",
    "determine_available_memory": "profiling",
    "initialize_from_config": "KV cache",
    "compile_or_warm_up_model": "warm-up",
    "execute_model": "step",
    "sample_tokens": "step",
}


class LoudWorker(FollowedWorker):
    """The platform's worker; each method of :data:`STAGES` records what it raises, and raises it on."""


def _loud(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(self, *args, **kwargs)
        except Exception as error:
            # The disk may be what is broken; the error itself goes on in any case.
            with suppress(OSError):
                recorder = getattr(self, "draftsmith", None)
                rows = recorder.rows_in_step if recorder is not None and STAGES[name] == "step" else None
                ledger.record(Path(os.environ[ledger.ERRORS]), error, stage=STAGES[name], rank=self.rank, rows=rows)
            raise

    return method


for _name in STAGES:
    if hasattr(FollowedWorker, _name):
        setattr(LoudWorker, _name, _loud(_name, getattr(FollowedWorker, _name)))
