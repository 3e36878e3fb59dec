"""The lines of a stage, in its log file and on the terminal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(("item", "shown"), [("2-of-8", "2-of-8 "), ("1-of-1", ""), ("11-of-11", "11-of-11 ")])
def test_a_terminal_that_several_shards_share_names_each(tmp_path: Path, item: str, shown: str) -> None:
    """So do the processes that a stage starts; the log is one shard's, and says nothing of it."""
    code = (
        "import subprocess, sys; from draftsmith.log import log, of_shard; of_shard(sys.argv[1]); log('extract: begun');"
        "subprocess.run([sys.executable, '-c', 'from draftsmith.log import log; log(chr(43))'], check=True, close_fds=False)"
    )
    with open(tmp_path / "terminal", "wb") as terminal:
        os.set_inheritable(terminal.fileno(), True)
        done = subprocess.run(
            [sys.executable, "-c", code, item], check=True, close_fds=False, capture_output=True, text=True,
            env=os.environ | {"DRAFTSMITH_CONSOLE": str(terminal.fileno()), "PYTHONPATH": "workflow"},
        )  # fmt: skip
    told = re.sub(r"^[\d:]{8} ", "", (tmp_path / "terminal").read_text(), flags=re.MULTILINE)
    assert told == f"{shown}extract: begun\n{shown}+\n"
    assert re.sub(r"^[\d:]{8} ", "", done.stderr, flags=re.MULTILINE) == "extract: begun\n+\n"
