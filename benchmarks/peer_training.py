"""Training of benchmarks/peer.py, in a process of its own: speculators 0.9 on a finished run's states, packs and schedule."""

from __future__ import annotations

import sys

# The standard library first: this folder has a tokenize.py too.
sys.path.append(sys.path.pop(0))

import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import speculators_step
import torch

from draftsmith import hardware
from draftsmith.config import Config, Train, parse
from draftsmith.draft.config import draft_shape
from draftsmith.draft.initial import read_vocabulary, target_head
from draftsmith.draft.teacher import target_ids
from draftsmith.errors import DraftsmithError
from draftsmith.export_draft.checks import expected_tensors
from draftsmith.export_draft.settings import verifier
from draftsmith.export_draft.tensors import export_dtype, vocabulary_tensors
from draftsmith.files import read_json, write_json
from draftsmith.log import log
from draftsmith.rows import read_rows
from draftsmith.store import StoreReader
from draftsmith.target_weights import embedding_weight
from draftsmith.train_draft import weights
from draftsmith.train_draft.ahead import Ahead
from draftsmith.train_draft.dataset import Row, usable_rows
from draftsmith.train_draft.plan import Plan, make_plan

# What flex attention's blocks are multiples of.
BLOCK = 128


def train(config: Config, results: Path, out: Path) -> None:
    """Train on what ``results`` (results/NAME of a run) holds; the draft goes to ``out``/train as the run's own has it, and to
    ``out``/speculators as speculators saves it."""
    given, device = config.train, hardware.device()
    manifest_path = results / "extract/manifest.json"
    ours, manifest = read_json(results / "train/train.json"), read_json(manifest_path)
    described = read_json(results / "target.json") | {"layers": manifest["layers"]}
    table = read_rows(
        results / "tokenize/rows.parquet", ["row_id", "split", "span_starts", "span_ends", "length"], ["repeats"]
    )
    rows = usable_rows(table, "train", manifest, manifest_path)
    plan = plan_of(given, rows, ours)
    packs = plan.packs[: ours["steps"] * plan.group]
    tokens = sum(rows[number].length for pack in packs for number in pack)
    if tokens != ours["tokens"]:
        log(f"peer: {tokens:,} tokens to train on, the run's train.json tells of {ours['tokens']:,}")

    d2t = read_vocabulary(results / "vocabulary/vocabulary.safetensors")
    shape = draft_shape(described, given, len(d2t))
    if shape.logit_cap is not None or given.source is not None:
        raise DraftsmithError(
            "speculators can neither cap the target's logits nor begin with the same initial draft; take a run without"
        )
    model = speculators_step.model(
        shape, embedding_weight(Path(described["path"])), target_head(described, shape).float() * shape.logit_scale, d2t,
        seed=given.seed, tokens=config.export.speculative_tokens, verifier=verifier(described), architectures=described["architectures"],
    )  # fmt: skip
    # Stored final states are post-norm already.
    model.verifier_norm = torch.nn.Identity()
    if model.use_draft_vocab:
        mapping = vocabulary_tensors(target_ids(d2t, shape.target_vocab), shape.target_vocab)
        model.load_vocab_mappings(mapping["t2d"], mapping["d2t"])
    model.to(device)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    log(f"peer: {trained / 1e6:.1f} M trained weights, {len(packs)} packs, {ours['steps']} steps, {tokens:,} tokens")
    source = StoreReader(Path(manifest["store"]), manifest["rows"], manifest["fingerprint"])
    course = run_steps(model, given, plan.steps, plan.group, packs, rows, source)

    model.cpu()
    state = {name: tensor.detach().float().contiguous() for name, tensor in model.state_dict().items()}
    kept = {name: state[name] for name in expected_tensors(shape) if name not in ("d2t", "t2d")}
    weights.write(kept, out / "train/draft.safetensors", {"fingerprint": "speculators"})
    model.to(export_dtype(config, described)).save_pretrained(out / "speculators")
    told = {
        "fingerprint": "speculators",
        "layers": manifest["layers"],
        "steps": ours["steps"],
        "epochs": ours["epochs"],
        "tokens": tokens,
    }
    told |= {"params": trained, "simulated_acceptance_length": None, **course}
    write_json(out / "train/train.json", told)


def plan_of(given: Train, rows: list[Row], ours: dict[str, Any]) -> Plan:
    """The run's own packs, in its own order."""
    group = ours.get("packs_per_step") or given.packs_per_step or ours["world_size"]
    plan = make_plan(
        [row.length for row in rows], given.pack_tokens, given.seed, given.epochs, given.max_steps, group, [row.repeats for row in rows]
    )  # fmt: skip
    if ours["steps"] > plan.steps:
        raise DraftsmithError(
            f"the run's train.json tells of {ours['steps']} steps, its config of {plan.steps}; give the config that it was trained with"
        )
    return plan


def run_steps(
    model: Any, given: Train, horizon: int, group: int, packs: list[list[int]], rows: list[Row], source: StoreReader
) -> dict[str, Any]:
    """One optimiser step for each ``group`` of ``packs``; seconds, and the loss of each logged step. ``horizon``: steps of the schedule.

    Optimiser and schedule are as the run's own: AdamW with decay on matrices alone, transformers' schedule, gradients clipped.
    """
    from transformers import get_scheduler

    learnt = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [each for each in learnt if each.ndim > 1], "weight_decay": given.weight_decay},
        {"params": [each for each in learnt if each.ndim == 1], "weight_decay": 0.0},
    ]
    on_gpu = hardware.device() == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    optimiser = torch.optim.AdamW(groups, lr=given.learning_rate, betas=given.betas, fused=on_gpu)
    schedule = get_scheduler(given.schedule, optimiser, round(given.warmup_fraction * horizon), horizon)
    config = speculators_step.loss_config()
    # One size for all packs: another one would be compiled anew.
    longest = max(sum(rows[number].length for number in pack) for pack in packs)
    size = -(-max(longest, given.pack_tokens) // BLOCK) * BLOCK
    ahead = Ahead(
        lambda numbers: speculators_step.batch_of(
            [(rows[number], source.row(rows[number].row_id)) for number in numbers], size, dtype
        )
    )
    model.train()
    steps, history, done = len(packs) // group, [], 0
    began = time.monotonic()
    read = (begun["pack"] for begun in ahead.ordered(ahead.submit(pack) for pack in packs))
    for step in range(1, steps + 1):
        optimiser.zero_grad()
        mean = 0.0
        for batch, count in itertools.islice(read, group):
            loss = speculators_step.loss_of(model, batch, given.ttt_steps, given.step_decay, config, dtype) / group
            loss.backward()
            mean, done = mean + loss.detach(), done + count
        torch.nn.utils.clip_grad_norm_(learnt, given.max_grad_norm)
        optimiser.step()
        schedule.step()
        if step in (1, steps) or step % given.logging_steps == 0:
            value, seconds = float(mean), time.monotonic() - began
            if not math.isfinite(value):
                raise DraftsmithError(f"speculators' loss is {value} at step {step}; take a lower train.learning_rate")
            history.append({"step": step, "loss": value})
            log(f"peer: step {step} of {steps}, loss {value:.4f}, {done / seconds:,.0f} tokens/s, {seconds:.0f} s")
    ahead.close()
    seconds = time.monotonic() - began
    return {"seconds": round(seconds, 1), "tokens_per_second": round(done / seconds, 1), "history": history}


def main(spec: Path) -> None:
    """Train what the JSON file ``spec`` asks for: config, results, out."""
    given = json.loads(spec.read_text())
    if hardware.device() == "cpu":
        torch.set_num_threads(len(hardware.cores()))
    train(parse(given["config"], "config"), Path(given["results"]), Path(given["out"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
