"""One way of benchmarks/training.py, in a process of its own: it trains, and writes what it measured.

ours, ours-head  train_draft, the stage itself
speculators      model, fused loss (eager on a CPU) and training step of vllm-project/speculators 0.9
"""

from __future__ import annotations

import sys

# The standard library first: this folder has a tokenize.py too.
sys.path.append(sys.path.pop(0))

import json
import resource
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import speculators_step
import torch

from draftsmith import hardware, train_draft
from draftsmith.config import parse
from draftsmith.draft.config import draft_shape
from draftsmith.draft.initial import read_vocabulary, target_head
from draftsmith.files import read_json
from draftsmith.rows import read_rows
from draftsmith.store import StoreReader
from draftsmith.target_weights import embedding_weight
from draftsmith.train_draft.dataset import usable_rows
from draftsmith.train_draft.plan import make_plan

DECAY = 0.8


def settings(spec: dict[str, Any], head: bool = False) -> dict[str, Any]:
    """The config's section ``train``."""
    steps = spec["steps"]
    return {
        "ttt_steps": spec["ttt_steps"], "step_decay": DECAY, "pack_tokens": spec["pack_tokens"], "max_steps": steps * (spec["windows"] + 1),
        "logging_steps": steps, "save_steps": 1_000_000, "train_head": head,
    } | spec["train"]  # fmt: skip


def ours(spec: dict[str, Any], head: bool) -> dict[str, Any]:
    """The stage; its own figures of each window."""
    folder = Path(spec["folder"])
    out = folder / f"{'head' if head else 'frozen'}-{spec['ttt_steps']}"
    with _profile(spec):
        train_draft.run(
            parse({"train": settings(spec, head)}, "benchmark"), target=folder / "target.json", rows=folder / "rows.parquet",
            manifest=folder / "manifest.json", vocabulary=folder / "vocabulary.safetensors", workdir=out / "work",
            draft=out / "draft.safetensors", report=out / "train.json",
        )  # fmt: skip
    report = read_json(out / "train.json")
    speeds = [entry["tokens_per_second"] for entry in report["history"] if entry["step"] > spec["steps"]]
    return {
        "tokens_per_second": statistics.median(speeds), "windows": [round(speed, 1) for speed in speeds],
        "waited_for_data": report["waited_for_data"], "trained_weights": report["params"],
        "loss": [entry["loss"] for entry in report["history"]],
    }  # fmt: skip


@contextmanager
def _profile(spec: dict[str, Any]) -> Iterator[None]:
    """Print into the way's log what takes the time, kernel by kernel on a GPU."""
    if not spec["profile"]:
        yield
        return
    on_gpu = hardware.device() == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as seen:
        yield
    print(seen.key_averages().table(f"self_{'cuda' if on_gpu else 'cpu'}_time_total", 50, max_name_column_width=100))


def speculators(spec: dict[str, Any]) -> dict[str, Any]:
    """Their step over our packs: forward under autocast, backward, clipping, AdamW."""
    device = hardware.device()
    given = parse({"train": settings(spec)}, "benchmark").train
    folder = Path(spec["folder"])
    target, manifest = read_json(folder / "target.json"), read_json(folder / "manifest.json")
    d2t = read_vocabulary(folder / "vocabulary.safetensors")
    shape = draft_shape(target, given, len(d2t))
    model = speculators_step.model(
        shape, embedding_weight(folder / "target"), target_head(target, shape), d2t, seed=0, tokens=given.ttt_steps
    ).to(device)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(
        weights, lr=given.learning_rate, betas=given.betas, weight_decay=0.0, fused=device == "cuda"
    )
    loss_config = speculators_step.loss_config()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    table = read_rows(folder / "rows.parquet", ["row_id", "split", "span_starts", "span_ends", "length"])
    rows = usable_rows(table, "train", manifest, folder / "manifest.json")
    plan = make_plan(
        [row.length for row in rows], given.pack_tokens, given.seed, given.epochs, given.max_steps, group=1
    )
    reader = StoreReader(Path(manifest["store"]), manifest["rows"], manifest["fingerprint"])
    ready = {tuple(pack): speculators_step.batch_of([(rows[row], reader.row(rows[row].row_id)) for row in pack], given.pack_tokens) for pack in plan.packs[: 2 * spec["packs"]]}  # fmt: skip
    order = [list(ready.values())[step % len(ready)] for step in range(len(plan.packs))]
    speeds, losses = [], []
    for window in range(spec["windows"] + 1):
        _wait(device)
        began, tokens = time.monotonic(), 0
        for batch, count in order[window * spec["steps"] : (window + 1) * spec["steps"]]:
            loss = speculators_step.loss_of(model, batch, given.ttt_steps, DECAY, loss_config, dtype)
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), given.max_grad_norm)
            optimiser.step()
            tokens += count
        losses.append(loss.item())
        _wait(device)
        speeds.append(tokens / (time.monotonic() - began))
    return {
        "tokens_per_second": statistics.median(speeds[1:]), "windows": [round(speed, 1) for speed in speeds[1:]],
        "waited_for_data": 0.0, "trained_weights": sum(parameter.numel() for parameter in weights), "loss": losses,
    }  # fmt: skip


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main(way: str, spec: Path, answer: Path) -> None:
    """Run one way."""
    given = json.loads(spec.read_text())
    if hardware.device() == "cpu":
        torch.set_num_threads(len(hardware.cores()))
    found = speculators(given) if way == "speculators" else ours(given, head=way == "ours-head")
    peak = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    found |= {"peak_gpu_gb": round(peak, 3), "peak_host_gb": round(host, 3)}
    answer.write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
