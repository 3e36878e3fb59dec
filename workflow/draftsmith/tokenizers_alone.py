"""transformers for its tokenizers alone: without PyTorch, which takes four fifths of the seconds that the import takes.

For processes that have nothing else to do; in one that has imported PyTorch already nothing is gained, and nothing done.
A tokenizer that brings its own code can still import PyTorch.
"""

from __future__ import annotations

import os
import sys

_QUIET = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


def load() -> None:
    """Import what opens a tokenizer; from then on transformers takes PyTorch for not installed in this process."""
    if "torch" in sys.modules or "transformers" in sys.modules:
        return
    # None is Python's own sign of a module that is not to be imported.
    sys.modules["torch"] = None  # type: ignore[assignment]
    before = os.environ.get(_QUIET)
    os.environ[_QUIET] = "1"
    try:
        import transformers.models.auto.tokenization_auto  # noqa: F401
    finally:
        del sys.modules["torch"]
        if before is None:
            del os.environ[_QUIET]
        else:
            os.environ[_QUIET] = before
