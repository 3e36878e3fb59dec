"""Lets Snakemake ask for its jobs every two seconds; the plugin asks ever less often, up to every three minutes."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
from after_import import after_import

SECONDS = 2


def change(remote):
    remote.RemoteExecutor.next_seconds_between_status_checks = property(
        lambda self: SECONDS, lambda self, seconds: None
    )


after_import("snakemake_interface_executor_plugins.executors.remote", change)
