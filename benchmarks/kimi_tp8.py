r"""Kimi-K2.5's published shape with dummy weights: plain prefill, this project's extraction and vLLM's connector, and what a layer costs.

    python benchmarks/kimi_tp8.py --tp 8 --store /dev/shm/kimi --disk /tmp/kimi --records kimi.jsonl --table
    python benchmarks/kimi_tp8.py --tp 2 --store /dev/shm/kimi --disk /tmp/kimi --records kimi.jsonl --table
    python benchmarks/kimi_tp8.py --quick

All 61 layers where they fit, otherwise as many as do, and four layers besides: what the difference costs is the cost of a
layer. Prompts of 512, 2,048 and 4,096 tokens; layers [2, 30, 58] and the final state. Engines whose weights fit beside one
another are loaded at once and take turns; else one is loaded after another. A line of JSON for each way and length, one for
each start, one for a way that does not run, and last the ratios and the cost of a layer. With --records the same call goes on
where it was cut off, so that a machine which is lent for ten minutes at a time will do. Gates are drawn so that tokens go to
all experts, which vLLM's dummy weights by themselves would not do (spread_experts.py).

The workflow itself takes a folder that this makes for the whole checkpoint, as far as no weights are read:

    python benchmarks/kimi_tp8.py --only-config --folder /tmp/kimi-hollow --tp 2 --conversations 200
    snakemake --profile local --configfile config/kimi-k2.5.yaml /tmp/kimi-hollow/overlay.yaml -- results/kimi-k2.5-hollow/dry_run.json

is the dry run at Kimi's real widths; it loads four of the folder's layers. Then the extraction through all of them, to time the
workflow itself; after a kill -9 in the middle `python -m draftsmith.stale_lock` and the same command go on. Preflight refuses to
store the states of random weights, so it must have passed before, and `--rerun-triggers mtime` keeps it from being made anew
for the one argument more:

    snakemake --profile local --configfile config/kimi-k2.5.yaml /tmp/kimi-hollow/overlay.yaml /tmp/kimi-hollow/dummy.yaml \
        --rerun-triggers mtime -- results/kimi-k2.5-hollow/extract/shards/1-of-1.json
"""

from __future__ import annotations

import sys

# The standard library first: this folder has a tokenize.py too.
sys.path.append(sys.path.pop(0))

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Annotated

import arguments
import kimi_figures
import kimi_target
import typer
from extraction_engine import WAYS
from kimi_run import Run

from draftsmith import hardware
from draftsmith.errors import DraftsmithError

# GiB of a GPU for a machine that has none.
_H200 = 139


def main(
    tp: Annotated[int, typer.Option(min=0, help="Tensor parallelism; 0: 8, and 1 with --quick.")] = 0,
    layers: Annotated[int, typer.Option(min=0, help="Layers of the deep target; 0: all, or as many as fit.")] = 0,
    few: Annotated[int, typer.Option(min=4, help="Layers of the other one.")] = kimi_target.FEW,
    lengths: Annotated[str, typer.Option(help="Lengths of prompts, each measured by itself.")] = "",
    tokens: Annotated[int, typer.Option(min=0, help="Tokens of one pass.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Passes of each way and length that count.")] = 2,
    ways: Annotated[str, typer.Option(help="Which to run; all, and with --quick plain,ours.")] = "",
    form: Annotated[
        str,
        typer.Option(help="whole, text (its language model alone), or auto: text where vLLM cannot start the whole."),
    ] = "auto",
    store: Annotated[
        Path, typer.Option(help="Folder in which one is made that is written to, and removed at the end.")
    ] = Path("work/benchmarks/kimi"),
    disk: Annotated[Path | None, typer.Option(help="Another folder, on a disk, that ours also writes to.")] = None,
    records: Annotated[
        Path | None,
        typer.Option(help="File of JSON lines: what is in it is not measured again, what is measured is added."),
    ] = None,
    table: Annotated[bool, typer.Option("--table", help="Also print tables in Markdown.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Small widths, for minutes on two CPU cores.")] = False,
    only_config: Annotated[
        bool, typer.Option("--only-config", help="Make --folder for the workflow, and measure nothing.")
    ] = False,
    folder: Annotated[Path | None, typer.Option(help="With --only-config: the folder to make.")] = None,
    conversations: Annotated[
        int,
        typer.Option(
            min=0,
            help="With --only-config: how many of about 3,500 tokens are made (0.2 GB of states each); 0: the demo's.",
        ),
    ] = 0,
    gpu_gib: Annotated[
        float,
        typer.Option(
            min=0, help="Memory of a GPU, for how many layers fit; 0: as this machine's have, 139 where it has none."
        ),
    ] = 0,
    spread: Annotated[bool, typer.Option(help="Draw gates such that tokens go to all experts.")] = True,
    args: Annotated[str, typer.Option(help="More arguments of vLLM's LLM, as JSON.")] = "{}",
    logs: Annotated[Path, typer.Option(help="Folder for the engines' logs.")] = Path("logs/benchmarks"),
) -> None:
    """Run the comparison."""
    small = quick or (hardware.device() == "cpu" and not only_config)
    tp = tp or (1 if small else 8)
    gpus = hardware.gpus()
    gpu_bytes = int((gpu_gib or _H200) * 2**30) if gpu_gib or not gpus else min(gpu.total for gpu in gpus)
    deep = layers or (2 * few if small else kimi_target.layers_that_fit(gpu_bytes, tp))
    if deep <= few or deep > kimi_target.DEPTH:
        raise DraftsmithError(
            f"--layers {deep}: give more than --few ({few}) and at most {kimi_target.DEPTH}; of this target "
            f"{kimi_target.layers_that_fit(gpu_bytes, tp)} layers fit on {tp} GPUs of {gpu_bytes / 2**30:.0f} GiB"
        )
    forms = arguments.among(form, (*kimi_target.FORMS, "auto"), "--form")
    if only_config:
        place, text = folder or Path("work/benchmarks/kimi-hollow"), "text" if forms == ["text"] else "whole"
        make_folder(place, deep, tp, text, quick, conversations)
        return
    if gpus and len(gpus) < tp:
        raise DraftsmithError(f"--tp {tp}: this machine has {len(gpus)} GPUs; lower it")
    run = Run(
        tp=tp, small=small, form="whole" if forms == ["auto"] else forms[0], fixed=forms != ["auto"], repeats=repeats,
        ways=arguments.among(ways or ",".join(WAYS[:2] if small else WAYS), WAYS, "--ways"), tokens=tokens or (2048 if small else 262144),
        lengths=arguments.numbers(lengths or ("64,128,256" if small else "512,2048,4096"), "--lengths"),
        args=arguments.mapping(args, "--args"), spread=spread, gpu_bytes=gpu_bytes, logs=logs, file=records,
    )  # fmt: skip
    run.read()
    if small:
        # Sockets and processes alike are those of a machine without GPUs.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    logs.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as made:
        run.scratch = Path(made.enter_context(tempfile.TemporaryDirectory(prefix="ds-kimi-")))
        run.store = Path(made.enter_context(arguments.within(store)))
        run.disk = Path(made.enter_context(arguments.within(disk))) if disk else None
        for depth in (few, deep):
            run.measure(depth)
    depths = (few, deep)
    told = {
        "record": "summary", "depths": depths, "ratios": kimi_figures.ratios(run.known),
        "slopes": kimi_figures.slopes(run.known, depths, kimi_target.DEPTH),
    }  # fmt: skip
    print(json.dumps(run.stamp | told), flush=True)
    if table:
        print("\n" + kimi_figures.tables(run.known, depths, kimi_target.DEPTH))


def make_folder(folder: Path, count: int, tp: int, form: str, quick: bool, conversations: int) -> None:
    """The hollow checkpoint of ``count`` layers and the config that names it; prints what was made."""
    described = kimi_target.write(folder, count, form, quick, checkpoint=True)
    data = kimi_target.DATA
    if conversations:
        data = str(folder.resolve() / "conversations.jsonl")
        kimi_target.conversations(Path(data), conversations)
    (folder / "overlay.yaml").write_text(kimi_target.overlay(folder, count, tp, data))
    (folder / "dummy.yaml").write_text("engine: {args: {load_format: dummy}}\n")
    size = (folder / "model.safetensors").stat().st_size
    print(json.dumps(described | {"hollow_bytes": size, "configfile": str(folder / "overlay.yaml")}))


if __name__ == "__main__":
    arguments.run(main)
