"""The acceptance length that training simulates beside the one that vLLM served, on the same answers of a finished run.

    python benchmarks/simulated.py CONFIG --run FOLDER --out FOLDER

CONFIG is the run's config file, ``--run`` its working folder. The run's own report has both figures too, but of different texts:
simulated on validation rows with ``train.ttt_steps`` tokens a draft, served on the evaluation's prompts with ``evaluate.k``. Here
the target's own answers to those prompts, as evaluate_draft kept them, become rows by their token ids; their states are
extracted, the exported draft is read as an initial draft, and what is looked at is its validation before the first step, at
``evaluate.k`` and at temperature 0. All of it by the run's own stages; what is in OUT already is not made anew.

One line of JSON: both lengths and the simulated one divided by the served.
"""

from __future__ import annotations

import sys

# The standard library first: this folder has a tokenize.py too.
sys.path.append(sys.path.pop(0))

import json
import os
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Annotated, Any

import arguments
import pandas as pd
import peer
import typer

from draftsmith import evaluate_draft, hardware
from draftsmith.config import load, parse
from draftsmith.errors import DraftsmithError
from draftsmith.evaluate_draft.servings import Measure, Servings
from draftsmith.files import read_json, write_json
from draftsmith.store import row_id
from draftsmith.workflow import Plan


def main(
    config: Annotated[Path, typer.Argument(help="The run's config file.")],
    run: Annotated[Path, typer.Option(exists=True, file_okay=False, help="The run's working folder.")],
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the states of the answers, and the figures.")],
) -> None:
    """Simulate on the answers that were served."""
    given, out = load(config), out.resolve()
    os.chdir(run)
    results = Path("results").resolve() / given.name
    served, trained = read_json(results / "evaluate/evaluate.json"), read_json(results / "train/train.json")
    if served.get("temperature") != 0:
        raise DraftsmithError(
            f"{config}: evaluate.temperature is not 0; what is simulated is greedy acceptance, and nothing was measured"
        )
    whole = given.model_dump(mode="json")
    whole["extract"] |= {"store": str(out / "store"), "storage": "target"}
    whole["train"] |= {
        "initial_draft": str(results / "draft"), "ttt_steps": served["k"], "packs_per_step": None, "max_steps": 1,
        "early_stopping_patience": None,
    }  # fmt: skip
    plan = Plan(parse(whole, str(config)))
    if plan.config.engine.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""

    spec = {"config": json.loads(plan.whole), "results": str(results), "training": trained["fingerprint"]}
    out.mkdir(parents=True, exist_ok=True)
    peer.check_out(out, spec)
    write_json(out / "spec.json", spec)
    rows = out / "rows.parquet"
    answers = kept_answers(Plan(given), results)
    as_rows(answers).to_parquet(rows, index=False)

    shard, manifest, report = out / "shard.json", out / "manifest.json", out / "train.json"
    extract = peer.stage(
        "extract-shard", plan.settings("extract_shard"), gpus=plan.gpus, target=results / "target.json", rows=rows,
        scatteritem="1-of-1", manifest=shard,
    )  # fmt: skip
    peer.step(out, "extract", extract, shard)
    merge = ["-m", "draftsmith", "merge-manifest", "--rows", str(rows), "--manifest", str(manifest), str(shard)]
    peer.step(out, "merge", merge, manifest)
    train = peer.stage(
        "train-draft", plan.settings("train_draft"), gpus=min(1, plan.gpus), target=results / "target.json", rows=rows,
        manifest=manifest, vocabulary=results / "vocabulary/vocabulary.safetensors", workdir=out / "work",
        draft=out / "draft.safetensors", report=report,
    )  # fmt: skip
    peer.step(out, "train", train, report)
    print(json.dumps(compared(read_json(report), served, len(answers)) | {"device": hardware.device()}), flush=True)


def kept_answers(plan: Plan, results: Path) -> list[tuple[list[int], list[int]]]:
    """Token ids of every prompt of the evaluation and of the target's greedy answer, those without one left out."""
    prompts = results / "tokenize/prompts.jsonl"
    questions = evaluate_draft.read_prompts(prompts)
    servings = Servings.of(
        plan.config, read_json(results / "target.json"), results / "draft", prompts, Path("work") / plan.config.name / "evaluate"
    )  # fmt: skip
    path = servings.folder / "plain" / f"{Measure(0.0).name}.json"
    if not path.exists():
        raise DraftsmithError(
            f"{path}: no such file; the run's own evaluation at temperature 0 must have been made here, by this vLLM"
        )
    answers = read_json(path)["outputs"]
    return [
        (question["prompt_token_ids"], answer)
        for question, answer in zip(questions, answers, strict=True)
        if len(answer) > 1
    ]


def as_rows(answers: list[tuple[list[int], list[int]]]) -> pd.DataFrame:
    """Rows as the stage tokenize writes them: all for validation, and one, a token shorter, that training asks for."""
    texts = [("validation", prompt, answer) for prompt, answer in answers]
    texts.append(("train", answers[0][0], answers[0][1][:-1]))
    rows = [row(split, prompt, answer) for split, prompt, answer in texts]
    return pd.DataFrame(rows).drop_duplicates("row_id")


def row(split: str, prompt: list[int], answer: list[int]) -> dict[str, Any]:
    """One row; its only span is the answer."""
    ids = [*prompt, *answer]
    identity = row_id(ids)
    return {
        "row_id": identity, "conversation_id": identity, "source": "served", "domain": "served", "split": split, "input_ids": ids,
        "span_starts": [len(prompt)], "span_ends": [len(ids)], "length": len(ids), "supervised": len(answer), "repeats": 1,
    }  # fmt: skip


def compared(report: dict[str, Any], served: dict[str, Any], rows: int) -> dict[str, Any]:
    """Both lengths, of the validation before the first step and of the run's evaluation."""
    first = min((entry for entry in report["history"] if "eval_acceptance_length" in entry), key=lambda e: e["step"])
    if first["step"] != 0:
        raise DraftsmithError(f"{served['k']} steps: the validation before the first step is not in the report")
    simulated = first["eval_acceptance_length"]
    return {
        "k": served["k"], "answers": rows, "simulated": round(simulated, 4), "served": served["acceptance_length"],
        "simulated_over_served": round(simulated / served["acceptance_length"], 4),
        "positions_served": served["per_position"],
        # Of all drafts, where the history has those that came so far.
        "positions_simulated": [round(share, 4) for share in accumulate(first["eval_acceptance"], mul)],
    }  # fmt: skip


if __name__ == "__main__":
    arguments.run(main)
