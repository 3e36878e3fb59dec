"""Fixtures that tests of every kind share."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

# Small tensors: a second thread only waits for the first.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

REPO = Path(__file__).resolve().parents[1]
# What runs leave in a working folder; nothing of it belongs to a clone.
_LEFTOVERS = shutil.ignore_patterns(
    ".*_cache", ".git", ".snakemake", ".venv", "__pycache__", "*.egg-info", "build", "logs", "results", "resources", "store", "work"
)  # fmt: skip


@pytest.fixture(scope="session")
def repo() -> Path:
    """Root of the repository."""
    return REPO


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that a `git clone` of the present working tree would give; for dry runs, which change none of them."""
    target = tmp_path_factory.mktemp("clone") / "draftsmith"
    if shutil.which("git") is None or not (REPO / ".git").exists():
        # An archive without its history.
        shutil.copytree(REPO, target, symlinks=True, ignore=_LEFTOVERS)
        return target
    listing = subprocess.run(
        ["git", "-c", f"safe.directory={REPO}", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPO, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(None, listing.stdout.split("\0")):
        if os.path.lexists(REPO / name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / name, target / name, follow_symlinks=False)
    return target


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that call Snakemake's API come last: it leaves objects in this process which vLLM's import trips over."""
    items.sort(key=lambda item: "dag" in item.path.parent.name)
