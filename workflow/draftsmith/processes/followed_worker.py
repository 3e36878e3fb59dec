"""vLLM's own worker, which ends with the process that drives its engine."""

from __future__ import annotations

from typing import Any

from draftsmith import vllm_compat
from draftsmith.processes import driver_watch

_Worker: Any = vllm_compat.worker_class()


class FollowedWorker(_Worker):  # type: ignore[misc]
    """The platform's worker, with a thread that waits for the driver's end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Before the load, which may take many minutes.
        driver_watch.follow_driver()
        super().__init__(*args, **kwargs)
