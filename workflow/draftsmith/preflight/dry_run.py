"""The dry run: extract_shard itself, on four rows, with dummy weights and few layers, into a store that is thrown away."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from draftsmith.config import Config
from draftsmith.files import read_json, write_json
from draftsmith.log import log
from draftsmith.preflight.checks import Check
from draftsmith.rows import read_rows

_LAYERS = 4
_ROWS = 4


def shrunk(config: Config, target: dict[str, Any], store: Path) -> tuple[Config, dict[str, Any]]:
    """The same run for a target of few layers with dummy weights: its config and its description."""
    raw = json.loads(Path(target["path"], "config.json").read_text())
    count = min(_LAYERS, target["num_layers"])
    override: dict[str, Any] = {"num_hidden_layers": count}
    kinds = (raw.get("text_config") or raw).get("layer_types")
    if kinds:
        override["layer_types"] = kinds[:count]
    if raw.get("text_config"):
        override = {"text_config": override}
    args = config.engine.args | {"load_format": "dummy", "hf_overrides": override}
    layers = list(range(1, count))[-len(target["layers"]) :] or [0]
    shrunk_config = config.model_copy(
        update={
            "target": config.target.model_copy(update={"layers": layers}),
            "engine": config.engine.model_copy(update={"args": args}),
            "extract": config.extract.model_copy(update={"store": str(store)}),
        }
    )
    return shrunk_config, target | {"num_layers": count, "fingerprint": "dry-run"}


def dry_run(config: Config, target: dict[str, Any], rows: Path) -> Check:
    """Run it in a process of its own; its output goes to this one's log."""
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="draftsmith-dry-run-") as folder:
        place = Path(folder)
        small_config, small_target = shrunk(config, target, place / "store")
        write_json(place / "target.json", small_target)
        read_rows(rows).nlargest(_ROWS, "length").to_parquet(place / "rows.parquet")
        write_json(place / "config.json", small_config.model_dump(mode="json"))
        log(f"preflight: dry run with {small_target['num_layers']} layers of dummy weights")
        done = subprocess.run(
            [
                sys.executable, "-m", "draftsmith", "extract-shard", "--settings", (place / "config.json").read_text(),
                "--config", str(place / "config.json"), "--target", str(place / "target.json"),
                "--rows", str(place / "rows.parquet"), "--scatteritem", "1-of-1", "--manifest", str(place / "manifest.json"),
            ]
        )  # fmt: skip
        seconds = time.perf_counter() - begun
        if done.returncode != 0:
            return Check(
                name="dry run",
                status="fail",
                detail=f"failed after {seconds:.0f} s; the traceback is above, in the log of preflight",
            )
        figures = read_json(place / "manifest.json")["figures"]
        return Check(
            name="dry run", status="ok",
            detail=f"{_ROWS} rows in {seconds:.0f} s, states read by {figures['method']} on {figures['runner'].rsplit('.', 1)[-1]}",
        )  # fmt: skip
