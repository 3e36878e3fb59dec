"""The environment of a user's shell, for programs that tests start."""

from __future__ import annotations

import os

# As the user has set them: an engine in this process will leave others behind, such as the folder of its sockets.
_VLLM = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}


def shell() -> dict[str, str]:
    """This process's variables, those of vLLM as they were when the tests began, and none of this workflow's own."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "DRAFTSMITH_"))}
    return mine | _VLLM
