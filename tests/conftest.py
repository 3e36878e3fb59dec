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
# What runs leave in a working folder; nothing of it belongs to a clone. The package has folders of some of these names.
_ANYWHERE = shutil.ignore_patterns(".*_cache", "__pycache__", "*.egg-info")
_AT_THE_ROOT = shutil.ignore_patterns(
    ".git", ".snakemake", ".venv", "build", "logs", "results", "resources", "store", "work"
)


def _left_over(folder: str, names: list[str]) -> set[str]:
    found = _ANYWHERE(folder, names)
    return found | _AT_THE_ROOT(folder, names) if Path(folder) == REPO else found


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
        shutil.copytree(REPO, target, symlinks=True, ignore=_left_over)
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


# The longest first, so that none is left to run alone at the end. Tests that call Snakemake's API come last: it leaves
# objects in this process which vLLM's import trips over.
_FIRST = ("test_slurm_chain.py", "test_chain.py", "test_slurm_extraction.py")
_FOLDERS = {"integration": 4, "dag": 9}


def _place(item: pytest.Item) -> int:
    name = item.path.name
    return _FIRST.index(name) if name in _FIRST else _FOLDERS.get(item.path.parent.name, 5)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests in the order in which they are handed to the processes that run them."""
    items.sort(key=_place)
