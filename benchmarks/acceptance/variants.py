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

from draftsmith import hardware
from draftsmith.config import Config, load, parse
from draftsmith.errors import DraftsmithError
from draftsmith.files import read_json

# Behind the standard library, of which the benchmarks' folder has a namesake.
sys.path.append(str(Path(__file__).resolve().parents[1]))

import arguments

HERE = Path(__file__).resolve().parent

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
    config: Annotated[Path, typer.Argument(help="The run's config file.")],
    run: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="Folder with results/NAME and the store.")
    ] = Path("."),
    out: Annotated[Path, typer.Option(help="Folder for the variants.")] = Path("work/variants"),
    only: Annotated[str, typer.Option(help="Names of the variants, with commas between.")] = "",
    parallel: Annotated[int, typer.Option(min=1, help="Variants at a time.")] = 4,
    changes: Annotated[str, typer.Option(help="Keys changed for all of them, as JSON.")] = "{}",
    one: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Run the variants; the exit code is 1 where one of them failed."""
    config, out = config.resolve(), out.resolve()
    # Paths of the run, such as that of its store, are relative to it.
    os.chdir(run)
    changed = arguments.mapping(changes, "--changes")
    names = [one] if one else arguments.among(only or ",".join(VARIANTS), VARIANTS, "--only")
    for name in names:
        check_results(Path("results") / settings(name, config, changed).name)
    if one:
        make(one, settings(one, config, changed, out / one), out / one)
        return
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(HERE / "variants.py"), str(config), "--out", str(out), "--changes", changes]

    def begin(name: str) -> bool:
        with open(out / f"{name}.log", "w") as log:
            code = subprocess.run([*command, "--one", name], stdout=log, stderr=log, env=os.environ).returncode
        line = (
            read_json(out / name / "line.json") if code == 0 else {"failed": (out / f"{name}.log").read_text()[-1500:]}
        )
        print(json.dumps({"variant": name, "changes": VARIANTS[name], **line}), flush=True)
        return code == 0

    with ThreadPoolExecutor(parallel) as threads:
        sys.exit(not all(list(threads.map(begin, names))))


def merged(*given: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Configs laid one over the other, section by section."""
    values: dict[str, Any] = {}
    for each in given:
        for section, keys in each.items():
            had = values.get(section)
            values[section] = had | keys if isinstance(had, dict) and isinstance(keys, dict) else keys
    return values


def settings(name: str, file: Path, changes: dict[str, Any], out: Path | None = None) -> Config:
    """The variant's config; where its states are extracted anew, they go to a store below ``out``."""
    variant, given = VARIANTS[name], load(file).model_dump(mode="json", exclude_unset=True)
    store = {"extract": {"store": str(out / "store")}} if out is not None and "extract" in variant else {}
    # With a KV cache of a given size an engine does not look at how much memory is free, which others change meanwhile.
    args = {"kv_cache_memory_bytes": 2 << 30} | given.get("engine", {}).get("args", {})
    cache = {"engine": {"args": args}} if hardware.device() == "cuda" else {}
    return parse(merged(given, ALIKE, cache, changes, variant, store), f"{file} with the variant {name}")


def check_results(results: Path) -> None:
    """Fail unless the run has come as far as a variant needs it."""
    for name in (
        "target.json",
        "tokenize/rows.parquet",
        "tokenize/prompts.jsonl",
        "extract/manifest.json",
        "vocabulary/vocabulary.safetensors",
    ):
        if not (results / name).is_file():
            raise DraftsmithError(
                f"{results.resolve() / name}: no such file; give the folder in which the run of this config was made as --run"
            )


def make(name: str, config: Config, out: Path) -> None:
    """One variant, in the run's folder: its draft, its evaluation and ``line.json``."""
    from draftsmith import evaluate_draft, export_draft, map_vocabulary, train_draft

    variant, results = VARIANTS[name], Path("results") / config.name
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
    arguments.run(main)
