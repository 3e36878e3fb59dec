"""Puts the stand-in engine in vLLM's place; Python imports this file by its name, where it is on the path."""

import importlib.abc
import importlib.util
import sys


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "draftsmith.extract_shard.driver":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            from stand_in_engine import StandIn

            module.Session = StandIn

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
