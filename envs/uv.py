"""Run uv with pip's settings: ``.venv/bin/python envs/uv.py cpu|cuda|any ARGUMENTS…``.

uv reads neither pip's configuration files nor its variables, so that a machine behind a proxy or with packages on its disk,
set up as everybody does it, would be passed over. Whatever is set for uv itself stays. With ``cpu`` and nowhere named
where PyTorch's CPU wheels are, uv takes them from PyTorch's own index.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

# pip's name, uv's variables of which none may be set already (the first is set), and what joins several values.
SAME = [
    ("find-links", ("UV_FIND_LINKS",), ","),
    ("index-url", ("UV_DEFAULT_INDEX", "UV_INDEX_URL"), " "),
    ("extra-index-url", ("UV_INDEX", "UV_EXTRA_INDEX_URL"), " "),
    ("no-index", ("UV_NO_INDEX",), " "),
    ("trusted-host", ("UV_INSECURE_HOST",), " "),
    ("cert", ("SSL_CERT_FILE",), " "),
    ("default-timeout", ("UV_HTTP_TIMEOUT",), " "),
]


def pip_settings(listing: str) -> dict[str, str]:
    """Values from the output of ``pip config list``: variables go before [install], and that before [global]."""
    found: dict[str, tuple[int, str]] = {}
    for line in listing.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in ("global", "install", ":env:"):
            rank = ("global", "install", ":env:").index(section)
            if rank >= found.get(key, (0, ""))[0]:
                found[key] = (rank, ast.literal_eval(value))
    return {key: value for key, (_, value) in found.items()}


def uv_variables(pip: Mapping[str, str], environment: Mapping[str, str], hardware: str) -> dict[str, str]:
    """Variables that uv needs on top of ``environment`` to see what pip sees."""
    wanted: dict[str, str] = {}
    for key, variables, joint in SAME:
        if pip.get(key) and not any(name in environment for name in variables):
            wanted[variables[0]] = joint.join(pip[key].split())
    if "UV_INDEX" in wanted and "UV_INDEX_STRATEGY" not in environment:
        # pip takes the best version of all indexes, uv by default the first index that has the package at all.
        wanted["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    elsewhere = {"UV_FIND_LINKS", "UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_TORCH_BACKEND"}
    if hardware == "cpu" and not elsewhere & {*wanted, *environment}:
        wanted["UV_TORCH_BACKEND"] = "cpu"
    return wanted


def main() -> None:
    """Become uv."""
    folder = Path(sys.executable).parent
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True
    ).stdout
    environment = os.environ | {"VIRTUAL_ENV": str(folder.parent)}
    environment |= uv_variables(pip_settings(listing), environment, sys.argv[1])
    os.execve(folder / "uv", ["uv", *sys.argv[2:]], environment)


if __name__ == "__main__":
    main()
