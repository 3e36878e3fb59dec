"""A tiny model's run, shared by the tests of the whole chain: its data, its config, and snakemake as it is typed."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from environment import shell

REPO = Path(__file__).resolve().parents[2]


def conversations(path: Path, count: int = 48) -> None:
    """Short conversations of a few words in two domains."""
    random.seed(1)
    words = ["red", "green", "blue", "cat", "dog", "sun", "moon", "one", "two", "three", "four", "five"]
    with open(path, "w") as file:
        for place in range(count):
            messages = []
            for _ in range(1 + place % 2):
                messages.append({"role": "user", "content": " ".join(random.choices(words, k=5))})
                messages.append({"role": "assistant", "content": " ".join(random.choices(words[:4], k=8))})
            file.write(
                json.dumps({"id": f"c{place}", "domain": ("left", "right")[place % 2], "messages": messages}) + "\n"
            )


def config(folder: Path, model: Path) -> dict[str, Any]:
    return {
        "name": "tiny",
        "target": {"source": str(model), "layers": [1, 2, 3]},
        "engine": {"max_num_batched_tokens": 128, "max_num_seqs": 8, "kv_cache_gib": 0.2},
        "data": {"sources": [{"path": str(folder / "conversations.jsonl")}]},
        "tokenize": {"max_length": 512, "evaluation_per_domain": 2, "validation_fraction": 0.1},
        "extract": {"store": str(folder / "store"), "batch_tokens": 512},
        "vocabulary": {"size": 128},
        "train": {
            "ttt_steps": 2,
            "max_steps": 6,
            "pack_tokens": 512,
            "save_steps": 2,
            "eval_steps": 3,
            "logging_steps": 1,
        },
        "evaluate": {"k": 2, "max_tokens": 8, "untrained": True, "temperatures": [1.0], "concurrency": [1, 4]},
    }


class Run:
    """A working folder with a config, and snakemake as it is typed."""

    def __init__(self, folder: Path, profile: str = "local", environment: Mapping[str, str] | None = None) -> None:
        self.folder, self.profile = folder, profile
        # A copy: what one test changes for its runs, the next one must not see.
        self.environment = dict(environment or {})
        self.config = folder / "config.yaml"

    def write(self, values: dict[str, Any]) -> None:
        self.config.write_text(yaml.safe_dump(values))

    def snakemake(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = shell() | self.environment | {"PATH": path, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [
                sys.executable, "-m", "snakemake", "-s", str(REPO / "Snakefile"), "-d", str(self.folder), "--profile",
                str(REPO / "profiles" / self.profile), "--configfile", str(self.config), *arguments,
            ],
            capture_output=True, text=True, env=environment,
        )  # fmt: skip
        if check and done.returncode:
            raise AssertionError(done.stdout[-4000:] + done.stderr[-12000:])
        return done

    def json(self, name: str) -> Any:
        return json.loads((self.folder / "results/tiny" / name).read_text())

    def command(self, *arguments: str) -> Any:
        """What ``draftsmith`` prints as JSON, called in the working folder."""
        done = subprocess.run(
            [sys.executable, "-m", "draftsmith", *arguments], capture_output=True, text=True, cwd=self.folder,
            env=shell() | {"PYTHONPATH": str(REPO / "workflow")},
        )  # fmt: skip
        if done.returncode:
            raise AssertionError(done.stdout[-4000:] + done.stderr[-4000:])
        return json.loads(done.stdout)

    def would_run(self, values: dict[str, Any]) -> set[str]:
        """Rules that a dry run with this config names."""
        self.write(values)
        text = self.snakemake("-n").stdout
        return set(re.findall(r"^(?:local)?rule (\w+):", text, re.M)) - {"all"}
