"""train_draft: train the draft on the stored states, resuming where an earlier try was stopped."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith import hardware
from draftsmith.config import Config, Train
from draftsmith.errors import DraftsmithError
from draftsmith.files import read_object, writing
from draftsmith.log import log
from draftsmith.signals import EXIT_TERMINATED, Termination
from draftsmith.target_fingerprint import states_fingerprint
from draftsmith.train_draft import ranks

if TYPE_CHECKING:
    from torch import Tensor

    from draftsmith.train_draft.dataset import Row

# Raise it when the same settings and rows come to mean another training; checkpoints of the old meaning are then left alone.
_FORMAT = 2
# What a training is watched, saved and computed by does not change where it leads; how far it goes is the plan's and the
# judge's business, which a resumed training asks anew.
_HOW = {
    "save_steps",
    "save_total_limit",
    "eval_steps",
    "logging_steps",
    "early_stopping_patience",
    "on_bad_loss",
    "attention",
    "compile",
    # What is in the folder counts, not where it lies.
    "initial_draft",
}


def run(
    config: Config,
    *,
    target: Path,
    rows: Path,
    manifest: Path,
    vocabulary: Path,
    workdir: Path,
    draft: Path,
    report: Path,
) -> None:
    """Train a draft and write the float32 weights of the best one to ``draft`` and the course of the training to ``report``.

    Checkpoints go to ``workdir``/FINGERPRINT, where a later call with the same settings, rows and target finds them; they
    stay there. With several GPUs one process is started for each. SIGTERM saves a checkpoint and ends with status 143.
    """
    paths = {
        "target": target,
        "rows": rows,
        "manifest": manifest,
        "vocabulary": vocabulary,
        "workdir": workdir,
        "draft": draft,
        "report": report,
    }
    gpus = len(hardware.gpus())
    if gpus > 1 and "RANK" not in os.environ:
        log(f"training on {gpus} GPUs, one process each")
        ranks.run_on_all(gpus, _train, {"config": config, **paths})
    else:
        _train(config, **paths)


def _train(
    config: Config,
    *,
    target: Path,
    rows: Path,
    manifest: Path,
    vocabulary: Path,
    workdir: Path,
    draft: Path,
    report: Path,
) -> None:
    import transformers

    from draftsmith.draft.attention import on_device
    from draftsmith.draft.config import draft_shape
    from draftsmith.draft.initial import initial_draft, read_vocabulary, target_head
    from draftsmith.draft.teacher import Teacher
    from draftsmith.draft.trained_as import trained_as
    from draftsmith.draft.warm_start import source_digest
    from draftsmith.rows import read_rows
    from draftsmith.store import StoreReader
    from draftsmith.target_weights import embedding_weight
    from draftsmith.train_draft import checkpoints, outcome, weights
    from draftsmith.train_draft.arguments import arguments
    from draftsmith.train_draft.dataset import RowDataset, usable_rows
    from draftsmith.train_draft.objective import Objective
    from draftsmith.train_draft.plan import Plan, figures, make_plan, pack_rows
    from draftsmith.train_draft.resume import check_fit, resumable
    from draftsmith.train_draft.trainer import DraftTrainer

    settings = config.train
    first = ranks.rank() == 0
    _use_all_cores()
    transformers.logging.set_verbosity_error()

    described = read_object(target, "path", "fingerprint", "hidden_size", "vocab_size")
    stored = read_object(manifest, "store", "fingerprint", "layers", "hidden_size", "rows")
    # The draft reads the layers whose states there are.
    described["layers"] = stored["layers"]
    _check_manifest(described, stored, manifest)
    # What another maker wrote may lack the column, and then takes each row once.
    table = read_rows(rows, ["row_id", "split", "span_starts", "span_ends", "length"], ["repeats"])
    training = usable_rows(table, "train", stored, manifest)
    held_out = usable_rows(table, "validation", stored, manifest)
    d2t = read_vocabulary(vocabulary)
    dtype = _dtype(settings)

    source_weights = None if settings.source is None else source_digest(settings.source)
    key = fingerprint(settings, described, stored, training + held_out, d2t, str(dtype), source_weights)
    folder = workdir / key
    with writing(folder, "train_draft"):
        folder.mkdir(parents=True, exist_ok=True)
    if first:
        for line in checkpoints.remove_broken(folder):
            log(line)

    def planned(notes: dict[str, Any]) -> Plan:
        return make_plan(
            [row.length for row in training],
            settings.pack_tokens,
            settings.seed,
            settings.epochs,
            settings.max_steps,
            settings.packs_per_step or notes.get("packs_per_step") or ranks.world_size(),
            [row.repeats for row in training],
        )

    checkpoint, notes, plan = resumable(folder, planned, log if first else lambda _: None)
    resumed = None if checkpoint is None else checkpoints.step_of(checkpoint)

    shape = draft_shape(described, settings, len(d2t))
    head = target_head(described, shape)
    model = initial_draft(shape, embedding_weight(Path(described["path"])), head, d2t, settings.seed, settings.source)
    model.lm_head.weight.requires_grad_(settings.train_head)
    fuse = settings.compile and hardware.device() == "cuda"
    attention = on_device(settings.attention, hardware.device())
    if first and attention not in ("auto", settings.attention):
        log(f"train.attention: {settings.attention} needs a GPU; without one attention goes row by row")
    model.prepare(attention, hardware.device(), fuse)
    objective = Objective(model, Teacher(shape, head, d2t), settings.ttt_steps, settings.step_decay, dtype, fuse)
    if checkpoint is not None:
        check_fit(checkpoint, objective)
    source = StoreReader(Path(stored["store"]), stored["rows"], stored["fingerprint"])
    cut = bool(stored.get("supervised_only"))
    params = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    if first:
        log(
            f"draft: {params / 1e6:.1f} M trained weights, {shape.heads} heads of {shape.head_dim}, vocabulary {shape.draft_vocab}; "
            f"{len(training)} rows, {sum(row.length for row in training):,} tokens in all, {plan.steps} steps of "
            f"{plan.group} pack(s) of {settings.pack_tokens} tokens, {settings.ttt_steps} TTT steps; checkpoints in {folder}"
        )
        if not held_out:
            log(
                "there are no validation rows (tokenize.validation_fraction): no validation loss, no simulated acceptance length"
            )
        overfull = plan.overfull(settings.epochs) if settings.max_steps is None else None
        if overfull is not None:
            log(overfull)
        if resumed is not None:
            log(f"resuming from step {resumed} of {plan.steps}")

    packs = pack_rows([row.length for row in held_out], range(len(held_out)), settings.pack_tokens)
    with Termination() as termination:
        trainer = DraftTrainer(
            objective,
            arguments(settings, folder, plan, validate=bool(held_out), fresh=resumed is None),
            plan,
            RowDataset(training, source, settings.ttt_steps, cut),
            packs,
            RowDataset(held_out, source, settings.ttt_steps, cut),
            termination,
            settings,
            notes,
        )
        if not trainer.ended_early(checkpoint):
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        if termination.asked:
            if first:
                log(
                    f"training: ended by SIGTERM; step {trainer.state.global_step} of {plan.steps} is saved in {folder}, "
                    "run the same command again to go on"
                )
            raise SystemExit(EXIT_TERMINATED)
        if held_out and trainer.validated_last() != trainer.state.global_step:
            trainer.evaluate()
    last = weights.whole(trainer.objective.draft)
    if first:
        packing = figures([row.length for row in training], plan.packs, settings.pack_tokens)
        packing["packs_per_pass"] = round(plan.per_epoch, 2)
        outcome.write(
            trainer,
            last,
            plan,
            folder,
            draft,
            report,
            key=key,
            layers=stored["layers"],
            resumed=resumed,
            params=params,
            packing=packing,
            trained=trained_as(shape, d2t, described),
        )


def fingerprint(
    settings: Train,
    target: dict[str, Any],
    manifest: dict[str, Any],
    rows: list[Row],
    d2t: Tensor,
    dtype: str,
    source: str | None = None,
) -> str:
    """16 hex digits over everything that changes where a training leads: settings, target, states, rows with their spans, order
    and split, vocabulary, precision, and the digest of the draft that it begins with, if that is not a new one.

    The number of processes is not among it: what a step is made of is ``packs_per_step``, and where that is unset a checkpoint
    notes what it was, so that a training which began on two GPUs goes on as the same one on four, or on one.
    """
    digest = hashlib.sha256()
    what = {
        "format": _FORMAT,
        "settings": settings.model_dump(mode="json", exclude=_HOW),
        # Rows come as tokens: what made them plays no part.
        "target": states_fingerprint(target),
        "states": manifest["fingerprint"],
        "layers": manifest["layers"],
        "dtype": dtype,
    }
    if source is not None:
        what["source"] = source
    digest.update(json.dumps(what, sort_keys=True).encode())
    for row in rows:
        repeats = f" x{row.repeats}" if row.repeats > 1 else ""
        digest.update(f"{row.row_id} {row.length} {row.starts} {row.ends}{repeats}\n".encode())
    digest.update(d2t.numpy().astype("<i8").tobytes())
    return digest.hexdigest()[:16]


def _check_manifest(target: dict[str, Any], manifest: dict[str, Any], origin: Path) -> None:
    if manifest["hidden_size"] != target["hidden_size"]:
        raise DraftsmithError(
            f"{origin}: its states are {manifest['hidden_size']} wide, the target {target['hidden_size']}; run extract_shard again"
        )


def _dtype(settings: Train) -> Any:
    import torch

    if settings.dtype != "auto":
        return getattr(torch, settings.dtype)
    return torch.bfloat16 if hardware.device() == "cuda" else torch.float32


def _use_all_cores() -> None:
    """Let torch use every core of this process's share, unless OMP_NUM_THREADS says otherwise."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(hardware.cores()) // ranks.local_world_size()))
