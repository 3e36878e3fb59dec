"""Acceptance length of drafts trained otherwise on the states of a finished run, one row of a table each.

    python benchmarks/acceptance/variants.py benchmarks/acceptance/smollm2.yaml --run . --out work/variants --parallel 4

RUN is the folder in which Snakemake made results/NAME and the store. Each variant is the config with a few keys changed, in
processes of its own: training, export and evaluation at temperature 0, with extraction or the vocabulary before them where
their keys changed. ``plain`` changes nothing, ``seed`` only the seed: what lies between those two is noise. Several run side
by side on one GPU, which changes their speed and not their drafts; so no times are told. One line of JSON a variant.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from draftsmith import hardware
from draftsmith.config import Config, parse
from draftsmith.files import read_json

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "seed": {"train": {"seed": 1}},
    "ttt-3": {"train": {"ttt_steps": 3}},
    "decay-1": {"train": {"step_decay": 1.0}},
    "decay-0.6": {"train": {"step_decay": 0.6}},
    "window-256": {"train": {"attention_window": 256}},
    "fp8": {"extract": {"storage": "fp8"}},
    "vocabulary-8k": {"vocabulary": {"size": 8192}},
    "frozen-head": {"train": {"train_head": False}},
    "rate-doubled": {"train": {"learning_rate": 1.0e-3}},
}
# What the drafts are compared by: every one alike, and no more than that.
ALIKE: dict[str, dict[str, Any]] = {
    "engine": {"enforce_eager": True, "gpu_memory_utilization": 0.12, "max_num_seqs": 64},
    "evaluate": {"ks": [], "temperatures": [], "concurrency": [], "untrained": False, "min_acceptance_length": 1.0},
}


def main(
    config: Path,
    run: Annotated[Path, typer.Option(help="Folder with results/NAME and the store.")] = Path("."),
    out: Annotated[Path, typer.Option(help="Folder for the variants.")] = Path("work/variants"),
    only: Annotated[str, typer.Option(help="Names of the variants, with commas between.")] = "",
    parallel: Annotated[int, typer.Option(help="Variants at a time.")] = 4,
    changes: Annotated[str, typer.Option(help="Keys changed for all of them, as JSON.")] = "{}",
    one: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Run the variants."""
    if one:
        make(one, config, run, out / one, json.loads(changes))
        return
    out.mkdir(parents=True, exist_ok=True)
    names = only.split(",") if only else list(VARIANTS)
    command = [sys.executable, __file__, str(config), "--run", str(run), "--out", str(out), "--changes", changes]

    def begin(name: str) -> None:
        with open(out / f"{name}.log", "w") as log:
            code = subprocess.run([*command, "--one", name], stdout=log, stderr=log, env=os.environ).returncode
        line = (
            read_json(out / name / "line.json") if code == 0 else {"failed": (out / f"{name}.log").read_text()[-1500:]}
        )
        print(json.dumps({"variant": name, "changes": VARIANTS[name], **line}), flush=True)

    with ThreadPoolExecutor(parallel) as threads:
        list(threads.map(begin, names))


def merged(*given: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Configs laid one over the other, section by section."""
    values: dict[str, Any] = {}
    for each in given:
        for section, keys in each.items():
            values[section] = values.get(section, {}) | keys if isinstance(keys, dict) else keys
    return values


def make(name: str, file: Path, run: Path, out: Path, changes: dict[str, Any]) -> None:
    """One variant: its draft, its evaluation and ``line.json``."""
    from draftsmith import evaluate_draft, export_draft, map_vocabulary, train_draft

    given, variant = yaml.safe_load(file.read_text()), VARIANTS[name]
    store = {"extract": {"store": str((out / "store").resolve())}} if "extract" in variant else {}
    # With a KV cache of a given size an engine does not look at how much memory is free, which others change meanwhile.
    cache = {"engine": {"args": {"kv_cache_memory_bytes": 2 << 30}}} if hardware.device() == "cuda" else {}
    config = parse(merged(given, ALIKE, cache, changes, variant, store), name)
    results = run / "results" / config.name
    out.mkdir(parents=True, exist_ok=True)
    target, rows, manifest = (
        results / "target.json",
        results / "tokenize/rows.parquet",
        results / "extract/manifest.json",
    )
    vocabulary = results / "vocabulary/vocabulary.safetensors"
    began = time.monotonic()
    if "extract" in variant:
        manifest = _extract(config, target, rows, out)
    if "vocabulary" in variant:
        vocabulary = out / "vocabulary.safetensors"
        map_vocabulary.run(
            config, target=target, rows=rows, tokenize_report=results / "tokenize/tokenize.json", vocabulary=vocabulary,
            report=out / "vocabulary.json",
        )  # fmt: skip
    train_draft.run(
        config, target=target, rows=rows, manifest=manifest, vocabulary=vocabulary, workdir=out / "work",
        draft=out / "draft.safetensors", report=out / "train.json",
    )  # fmt: skip
    export_draft.run(
        config, target=target, draft=out / "draft.safetensors", vocabulary=vocabulary, train_report=out / "train.json",
        folder=out / "draft", report=out / "draft/export.json",
    )  # fmt: skip
    evaluate_draft.run(
        config, target=target, draft=out / "draft", vocabulary=vocabulary, prompts=results / "tokenize/prompts.jsonl",
        workdir=out / "evaluate", report=out / "evaluate.json",
    )  # fmt: skip
    trained, measured = read_json(out / "train.json"), read_json(out / "evaluate.json")
    line = {
        **{key: measured[key] for key in ("acceptance_length", "per_position", "outputs_equal")},
        "simulated_acceptance_length": trained["simulated_acceptance_length"],
        "trained": {key: trained[key] for key in ("steps", "tokens", "params")},
        "per_domain": {domain: figures["acceptance_length"] for domain, figures in measured["per_domain"].items()},
        "seconds": round(time.monotonic() - began),
    }
    (out / "line.json").write_text(json.dumps(line))


def _extract(config: Config, target: Path, rows: Path, out: Path) -> Path:
    """The states anew, in a store of the variant's own; gives the manifest. A process of its own has the engine."""
    from draftsmith import extract_shard, merge_manifest

    child = os.fork()
    if child == 0:
        try:
            extract_shard.run(
                config, target=target, rows=rows, scatteritem="1-of-1", gpus=None, manifest=out / "1-of-1.json"
            )
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        raise SystemExit("the extraction failed; its traceback is above")
    merge_manifest.run(rows=rows, shards=[out / "1-of-1.json"], manifest=out / "manifest.json")
    return out / "manifest.json"


if __name__ == "__main__":
    typer.run(main)
