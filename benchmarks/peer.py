"""Acceptance length beside vllm-project/speculators' draft, trained on a finished run's own states and served the same way.

    python benchmarks/peer.py CONFIG --run FOLDER --speculators FOLDER --out FOLDER

CONFIG is the run's config file, ``--run`` its working folder, with results/NAME and whatever the config names by a relative
path; ``--speculators`` is made by `pip install --no-deps --target FOLDER speculators==0.9.0 hs-connectors==0.9.0`, and needless
where that is installed.

Theirs is their Eagle3DraftModel, with their training step and their default loss (``kl_div``, forward KL over the draft
vocabulary) on the same stored states, the same packs in the same order, so as many tokens and optimiser steps, the same draft
vocabulary, shape, training-time test and learning rates, with AdamW as the run has it (theirs would be Muon by default); one
process, bfloat16 autocast with flex attention and fused loss on a GPU, float32 and eager on a CPU. What stays theirs: which
tokens count, a frozen head, the mean over each pack, and the weights of the last step, where the run keeps those of its best
validation.

OUT/speculators is the draft as they save it; OUT/draft has the same weights, exported by this project's own stage, so that both
drafts are served from one format. That is measured by the run's own evaluate_draft, at its main draft length and temperature.
One line of JSON for each draft, and last the ratio. What is in OUT already is not made anew.
"""

from __future__ import annotations

import sys

# The standard library first: this folder has a tokenize.py too.
sys.path.append(sys.path.pop(0))

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Annotated, Any

import arguments
import typer

from draftsmith import hardware
from draftsmith.config import load
from draftsmith.errors import DraftsmithError
from draftsmith.files import read_json, write_json
from draftsmith.workflow import Plan

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parent / "workflow"
# More measures of the same stage, which say nothing about the comparison, and its gate.
ONCE = {"ks": [], "temperatures": [], "concurrency": [], "untrained": False, "min_acceptance_length": 1.0}


def main(
    config: Annotated[Path, typer.Argument(help="The run's config file.")],
    run: Annotated[Path, typer.Option(exists=True, file_okay=False, help="The run's working folder.")],
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the peer's draft and its figures.")],
    speculators: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="Folder with speculators 0.9.")
    ] = None,
) -> None:
    """Train, serve and measure the peer's draft."""
    plan = Plan(load(config))
    places, out = [speculators.resolve()] if speculators else [], out.resolve()
    os.chdir(run)
    results = Path("results").resolve() / plan.config.name
    ours, trained = read_json(results / "evaluate/evaluate.json"), read_json(results / "train/train.json")
    asked = plan.config.evaluate
    for name in ("k", "temperature", "max_tokens"):
        had, wants = ours.get(name), getattr(asked, name)
        if had is None:
            sys.exit(
                f"{results / 'evaluate/evaluate.json'}: tells no {name}, as an older version wrote it; evaluate the run again"
            )
        if had != wants:
            sys.exit(
                f"{config}: evaluate.{name} is {wants}, and the run was measured with {had}; give the run's own config"
            )
    if plan.config.engine.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    (out / "train").mkdir(parents=True, exist_ok=True)

    seconds = {}
    spec = {
        "config": json.loads(plan.whole),
        "results": str(results),
        "out": str(out),
        "training": trained["fingerprint"],
    }
    check_out(out, spec)
    write_json(out / "spec.json", spec)
    training = [str(HERE / "peer_training.py"), str(out / "spec.json")]
    seconds["train"] = step(out, "train", training, out / "train/train.json", places)
    export = stage(
        "export-draft", plan.settings("export_draft"), target=results / "target.json", draft=out / "train/draft.safetensors",
        vocabulary=results / "vocabulary/vocabulary.safetensors", train_report=out / "train/train.json", folder=out / "draft",
        report=out / "draft/export.json",
    )  # fmt: skip
    seconds["export"] = step(out, "export", export, out / "draft/export.json")
    evaluation = stage(
        "evaluate-draft", evaluation_settings(plan), gpus=plan.gpus, target=results / "target.json", draft=out / "draft",
        vocabulary=results / "vocabulary/vocabulary.safetensors", prompts=results / "tokenize/prompts.jsonl",
        workdir=out / "work", report=out / "evaluate/evaluate.json",
    )  # fmt: skip
    whole = {"DRAFTSMITH_CONFIG": plan.whole}
    seconds["evaluate"] = step(out, "evaluate", evaluation, out / "evaluate/evaluate.json", variables=whole)

    lines = [
        line("ours", ours, trained),
        line("speculators", read_json(out / "evaluate/evaluate.json"), read_json(out / "train/train.json")),
    ]
    for each in [*lines, ratios(*lines) | {"device": hardware.device(), "wall_seconds": seconds}]:
        print(json.dumps(each), flush=True)


def check_out(out: Path, spec: dict[str, Any]) -> None:
    """Fail where ``out`` has what was made for another run, config or training: its figures would be taken for this one's."""
    if not (out / "spec.json").exists():
        return
    had = read_json(out / "spec.json")
    other = [name for name in ("config", "results", "training") if had.get(name) != spec[name]]
    if other:
        raise DraftsmithError(
            f"{out}: was made for another run ({', '.join(other)} differ); give another folder as --out, or delete it"
        )


def evaluation_settings(plan: Plan) -> str:
    """The stage's settings as its rule gives them, but for what is measured in addition and the gate."""
    settings = json.loads(plan.settings("evaluate_draft"))
    return json.dumps(settings | {"evaluate": settings["evaluate"] | ONCE}, sort_keys=True)


def stage(name: str, settings: str, **options: object) -> list[str]:
    """A stage's command as a rule has it, without the interpreter."""
    given = [[f"--{option.replace('_', '-')}", str(value)] for option, value in options.items()]
    return ["-m", "draftsmith", name, "--settings", settings, *(word for pair in given for word in pair)]


def step(
    out: Path, name: str, command: list[str], result: Path, places: list[Path] | None = None, variables: dict[str, str] | None = None
) -> float:  # fmt: skip
    """Run ``command`` with this Python unless its ``result`` is there; wall-clock seconds. Output goes to OUT/NAME.log."""
    began = time.monotonic()
    if result.exists():
        return 0.0
    clean = {key: value for key, value in os.environ.items() if not key.startswith("DRAFTSMITH_")}
    path = os.pathsep.join([*map(str, [PACKAGE, *(places or [])]), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    log = out / f"{name}.log"
    with open(log, "w") as file:
        done = subprocess.run(
            [sys.executable, *command], env=clean | {"PYTHONPATH": path} | (variables or {}), stdout=file, stderr=file
        )
    if done.returncode or not result.exists():
        sys.exit(f"{name} ended with {done.returncode}; the end of {log}:\n{log.read_text()[-6000:]}")
    return round(time.monotonic() - began, 1)


def line(draft: str, evaluated: dict[str, Any], trained: dict[str, Any]) -> dict[str, Any]:
    """What one draft reached, and what it was trained with."""
    return {
        "draft": draft, "acceptance_length": evaluated["acceptance_length"],
        "per_domain": {name: figures["acceptance_length"] for name, figures in evaluated["per_domain"].items()},
        "k": evaluated["k"], "temperature": evaluated["temperature"], "prompts": evaluated["prompts"],
        "outputs_equal": evaluated["outputs_equal"], "trained_tokens": trained["tokens"], "optimiser_steps": trained["steps"],
        "training_seconds": trained["seconds"], "trained_weights": trained["params"],
    }  # fmt: skip


def ratios(ours: dict[str, Any], peer: dict[str, Any]) -> dict[str, Any]:
    """Acceptance length of ours divided by the peer's, over all prompts and by domain."""
    return {
        "ours_over_peer": round(ours["acceptance_length"] / peer["acceptance_length"], 4),
        "per_domain": {
            name: round(length / peer["per_domain"][name], 4) for name, length in ours["per_domain"].items()
        },
    }


if __name__ == "__main__":
    arguments.run(main)
