"""``draftsmith estimate``: what a run will need, before anything is loaded: bytes, files, memory and hours, each with its formula.

Only the target's config.json is read, and the rows or a sample of the conversations; neither PyTorch nor vLLM is imported,
so that it answers in seconds on a login node.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from draftsmith import config as settings
from draftsmith.config import Config
from draftsmith.errors import DraftsmithError
from draftsmith.estimate import disk, extraction, jobs, model, rates, slurm, storage, training, weights
from draftsmith.estimate.rows import Planned, planned
from draftsmith.estimate.target import Subject, subject
from draftsmith.estimate.times import Stages
from draftsmith.train_draft.plan import make_plan

# A plan of more rows takes longer than the estimate may.
_PLANNED_ROWS = 20_000
_FILL = 0.97


@dataclass(frozen=True)
class Asked:
    """The command's options; None where the user has said nothing."""

    config: Path
    results: Path | None = None
    measured: Path | None = None
    target: Path | None = None
    rates: Sequence[str] = ()
    rates_file: Path | None = None
    rows: int | None = None
    row_tokens: int | None = None
    device: str = "auto"
    gpu_gib: float | None = None
    shards: int | None = None
    profile: str = "local"


def estimate(asked: Asked) -> model.Estimate:
    """Everything that can be told of a run beforehand.

    Raises :class:`DraftsmithError` for a config, a target, sources or a measured run that cannot be read.
    """
    begun = time.perf_counter()
    config = settings.load(asked.config)
    settings.check_consistent(config, str(asked.config))
    if asked.measured is not None and not asked.measured.is_dir():
        raise DraftsmithError(
            f"{asked.measured}: no run has left results there, whose speed could be taken; give --measured the results/NAME of "
            "one that has ended (`make demo` leaves results/demo), or --rate NAME=NUMBER"
        )
    # Beside the rest, as it takes the longest.
    dry_run = jobs.DryRun(asked.profile, asked.config, asked.target)
    results = asked.results or Path("results") / config.name
    target, why = subject(config, results, asked.target, asked.device)
    rows = planned(config, target, results, asked.rows, asked.row_tokens)
    known = rates.given(rates.measured(asked.measured or results), asked.rates, asked.rates_file)
    submitted = dry_run.asked()
    return _Run(asked, config, target, rows, known, submitted, why).estimate(begun)


class _Run:
    def __init__(
        self,
        asked: Asked,
        config: Config,
        target: Subject,
        rows: Planned,
        known: rates.Rates,
        submitted: jobs.Asked,
        why: str,
    ) -> None:
        self.asked, self.config, self.target, self.rows, self.known, self.submitted = (
            asked,
            config,
            target,
            rows,
            known,
            submitted,
        )
        self.shards = asked.shards or submitted.shards
        self.gpus = config.engine.tp if target.device == "cuda" else 0
        # Every GPU of the training's job trains; on Slurm that may be those of several nodes.
        spread = target.device == "cuda" and submitted.on_slurm("train_draft")
        self.nodes = submitted.nodes("train_draft") if spread else 1
        trained_on = submitted.number("train_draft", "gpu") or self.gpus
        if not spread:
            # Without Slurm a job is given what this machine has, which need not be the one of the run.
            trained_on = max(trained_on, self.gpus)
        self.world = trained_on if target.device == "cuda" else 1
        # Of one machine's memory every engine that runs beside another takes as much.
        self.engines_here = self.shards if self.gpus and not submitted.on_slurm("extract_shard") else 1
        self.gpu_bytes, gpu_from = _gpu_bytes(asked)
        on = f" on {self.nodes} nodes, the host's memory being that of one" if self.nodes > 1 else ""
        self.assumptions = [why, f"{self.shards} shard(s) side by side, {self.world} training process(es){on}"]
        if target.device == "cuda":
            self.assumptions.append(gpu_from)

    def estimate(self, begun: float) -> model.Estimate:
        """All parts."""
        config, target, rows = self.config, self.target, self.rows
        stores = storage.stores(target, rows.stored, self.shards)
        shard = storage.batches(target, config.extract.storage, rows.stored, self.shards)
        draft = training.shape(target)
        supervised = rows.told.supervised_tokens / max(1, rows.told.tokens)
        extraction_host = extraction.on_host(target, shard)
        training_gpu = training.on_device(target, draft, self.world, supervised)
        training_host = training.on_host(target, draft, max(1, self.world // self.nodes))
        on_disk = training.on_disk(target, draft)
        times = Stages(
            config, rows.told, self.known, shards=self.shards, world=self.world, training_tokens=self._training_tokens(),
            weights=weights.weights(target)[0], gpus=self.gpus,
        ).every()  # fmt: skip
        extraction_gpu = extraction.on_gpu(target, rows.told.longest, self.gpu_bytes)
        host = model.total(training_host) + (model.total(training_gpu) if target.device == "cpu" else 0)
        memory = {"extract_shard": model.total(extraction_host) * self.engines_here, "train_draft": host}
        chosen = model.chosen(stores)
        return model.Estimate(
            name=config.name,
            target=model.Target(
                source=config.target.source, model_type=target.outline["model_type"], read_from=target.read_from,
                num_layers=target.outline["num_layers"], hidden_size=target.outline["hidden_size"],
                vocab_size=target.outline["vocab_size"], layers=target.layers, dtype=target.dtype, device=target.device, tp=config.engine.tp,
            ),
            rows=rows.told, store=stores, disk=on_disk, extraction_gpu=extraction_gpu, extraction_host=extraction_host,
            training_gpu=training_gpu, training_host=training_host, times=times,
            checks=[
                *disk.rooms(
                    [
                        disk.Need("store", Path(config.extract.store), chosen.bytes, chosen.files),
                        disk.Need("work and results", Path("work"), model.total(on_disk)),
                    ]
                ),
                *self._gpu_checks(extraction_gpu, training_gpu),
                *slurm.checks(times, memory, self.submitted),
            ],
            assumptions=self.assumptions, seconds=round(time.perf_counter() - begun, 2),
        )  # fmt: skip

    def _training_tokens(self) -> int:
        """Tokens of all steps, as :func:`draftsmith.train_draft.plan.make_plan` deals them out."""
        train, lengths = self.config.train, self.rows.training
        group = train.packs_per_step or self.world
        if len(lengths) <= _PLANNED_ROWS and lengths:
            plan = make_plan(
                lengths, train.pack_tokens, train.seed, train.epochs, train.max_steps, group, self.rows.repeats
            )
            return sum(lengths[row] for pack in plan.packs for row in pack)
        if train.max_steps is not None:
            return round(train.max_steps * group * train.pack_tokens * _FILL)
        return round(self.rows.told.training_tokens * train.epochs)

    def _gpu_checks(self, extraction_gpu: list[model.Figure], training_gpu: list[model.Figure]) -> list[model.Check]:
        if self.target.device == "cpu" or self.gpu_bytes is None:
            return []
        fixed, cache = extraction_gpu[:-1], extraction_gpu[-1]
        per_token, _ = weights.kv_bytes_per_token(self.target)
        need = model.total(fixed) + self.rows.told.longest * per_token
        have = int(self.gpu_bytes * self.config.engine.gpu_memory_utilization)
        train = model.total(training_gpu)
        return [
            model.Check(
                name="extraction: GPU memory", status="ok" if need <= 0.95 * have else "fail",
                detail=f"{need / 1e9:,.1f} GB at least, vLLM may take {have / 1e9:,.1f}; {cache.bytes / 1e9:,.1f} GB are left for the KV cache and "
                "the step" + ("" if need <= 0.95 * have else "; raise engine.tp"),
            ),
            model.Check(
                name="training: GPU memory", status="ok" if train <= 0.9 * self.gpu_bytes else "fail",
                detail=f"about {train / 1e9:,.1f} GB of {self.gpu_bytes / 1e9:,.1f}" + ("" if train <= 0.9 * self.gpu_bytes else "; lower train.pack_tokens"),
            ),
        ]  # fmt: skip


def _gpu_bytes(asked: Asked) -> tuple[int | None, str]:
    if asked.gpu_gib is not None:
        return int(asked.gpu_gib * 2**30), f"GPUs of {asked.gpu_gib:g} GiB, as --gpu-gib says"
    from draftsmith import hardware

    found = hardware.gpus()
    if found:
        return min(gpu.total for gpu in found), f"GPUs as this machine has: {found[0].name}"
    return None, "the GPUs' memory is unknown; --gpu-gib names it (H200: 139)"


def run(asked: Asked, *, as_json: bool) -> None:
    """Print the estimate: a table for people, JSON for programs."""
    found = estimate(asked)
    if as_json:
        print(found.model_dump_json(indent=2))
        return
    from draftsmith.estimate import table
    from draftsmith.terminal import console

    table.show(found, console())
