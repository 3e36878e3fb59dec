"""The environment of a user's shell, for programs that tests start."""

from __future__ import annotations

import os


def shell() -> dict[str, str]:
    """This process's variables without those that an engine in it has left behind, such as the folder of its sockets."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "DRAFTSMITH_"))}
