"""Breaks one rank of a running extraction, as DRAFTSMITH_FAULT (JSON: kind, rank, step) says, or lets its engine outlive the driver; Python imports this file by its name.

It is on the path of the tests' own processes alone, and reaches the workers because they inherit it.
"""

import importlib.abc
import importlib.util
import json
import os
import signal
import sys

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


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "draftsmith.extract_shard.worker":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            if FAULT["kind"] == "outlive":
                # Imported before the worker is made: it will not look after its driver.
                sys.modules["draftsmith.processes.driver_watch"].follow_driver = lambda: None
                return
            module.Recorder.steps_seen = 0
            module.Recorder.execute_model = broken(module.Recorder.execute_model)

        spec.loader.exec_module = exec_module
        return spec


if FAULT:
    sys.meta_path.insert(0, Finder())
