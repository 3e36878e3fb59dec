"""Breaks one rank of a running extraction, as DRAFTSMITH_FAULT (JSON: kind, rank, step) says, or lets its engine outlive the driver; Python imports this file by its name.

It is on the path of the tests' own processes alone, and reaches the workers because they inherit it.
"""

import json
import os
import signal
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
from after_import import after_import

FAULT = json.loads(os.environ.get("DRAFTSMITH_FAULT", "null"))


def broken(execute):
    def execute_model(self, *args, **kwargs):
        if self.rank == FAULT["rank"] and self.steps_seen == FAULT["step"]:
            if FAULT["kind"] == "assert":
                assert self.steps_seen < 0
            os.kill(os.getpid(), signal.SIGKILL)
        self.steps_seen += 1
        return execute(self, *args, **kwargs)

    return execute_model


def change(worker):
    worker.Recorder.steps_seen = 0
    worker.Recorder.execute_model = broken(worker.Recorder.execute_model)


def forget_the_driver(watch):
    watch.follow_driver = lambda: None


if FAULT and FAULT["kind"] == "outlive":
    # Before vLLM's core asks for it as a plugin, and before a worker is made.
    after_import("draftsmith.processes.driver_watch", forget_the_driver)
elif FAULT:
    after_import("draftsmith.extract_shard.worker", change)
