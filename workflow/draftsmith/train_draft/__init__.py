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
from draftsmith.files import atomic_path, read_json, write_json
from draftsmith.log import log
from draftsmith.signals import EXIT_TERMINATED, Termination
from draftsmith.train_draft import ranks

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import TrainingArguments

    from draftsmith.train_draft.dataset import Row
    from draftsmith.train_draft.packing import Plan
    from draftsmith.train_draft.trainer import DraftTrainer

# Raise it when the same settings and rows come to mean another training; checkpoints of the old meaning are then left alone.
_FORMAT = 1
# What a training is watched and saved by does not change where it leads.
_WATCHING = {"save_steps", "save_total_limit", "eval_steps", "logging_steps"}


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
    """Train a draft and write its float32 weights to ``draft`` and the course of the training to ``report``.

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

    from draftsmith.draft.config import draft_shape
    from draftsmith.draft.initial import initial_draft, read_vocabulary, target_head
    from draftsmith.draft.teacher import Teacher
    from draftsmith.rows import read_rows
    from draftsmith.store import StoreReader
    from draftsmith.target_weights import embedding_weight
    from draftsmith.train_draft import checkpoints
    from draftsmith.train_draft.dataset import RowDataset, usable_rows
    from draftsmith.train_draft.objective import Objective
    from draftsmith.train_draft.packing import make_plan, pack_rows
    from draftsmith.train_draft.trainer import DraftTrainer

    settings = config.train
    first = ranks.rank() == 0
    _use_all_cores()
    transformers.logging.set_verbosity_error()

    described, stored = read_json(target), read_json(manifest)
    # The draft reads the layers whose states there are.
    described["layers"] = stored["layers"]
    _check_manifest(described, stored, manifest)
    table = read_rows(rows, ["row_id", "split", "span_starts", "span_ends", "length"])
    training = usable_rows(table, "train", stored, manifest)
    held_out = usable_rows(table, "validation", stored, manifest)
    d2t = read_vocabulary(vocabulary)
    dtype = _dtype(settings)

    plan = make_plan(
        [row.length for row in training],
        settings.pack_tokens,
        settings.seed,
        settings.epochs,
        settings.max_steps,
        settings.gradient_accumulation * ranks.world_size(),
    )
    key = fingerprint(settings, described, stored, training + held_out, d2t, str(dtype), ranks.world_size())
    folder = workdir / key
    folder.mkdir(parents=True, exist_ok=True)
    resumed, notes = None, None
    if first:
        for broken in checkpoints.remove_incomplete(folder):
            log(f"{broken} was not finished when its writer ended; it is removed")
    if (checkpoint := checkpoints.newest(folder)) is not None:
        resumed, notes = checkpoints.step_of(checkpoint), checkpoints.complete(checkpoint)

    shape = draft_shape(described, settings, len(d2t))
    head = target_head(described, shape)
    model = initial_draft(shape, embedding_weight(Path(described["path"])), head, d2t, settings.seed)
    model.lm_head.weight.requires_grad_(settings.train_head)
    objective = Objective(model, Teacher(shape, head, d2t), settings.ttt_steps, settings.step_decay, dtype)
    source = StoreReader(Path(stored["store"]), stored["rows"], stored["fingerprint"])
    cut = bool(stored.get("supervised_only"))
    params = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    if first:
        log(
            f"draft: {params / 1e6:.1f} M trained weights, {shape.heads} heads of {shape.head_dim}, vocabulary {shape.draft_vocab}; "
            f"{len(training)} rows of {sum(row.length for row in training):,} tokens, {plan.steps} steps of "
            f"{plan.group} pack(s) of {settings.pack_tokens} tokens, {settings.ttt_steps} TTT steps; checkpoints in {folder}"
        )
        if not held_out:
            log(
                "there are no validation rows (tokenize.validation_fraction): no validation loss, no simulated acceptance length"
            )
        if resumed is not None:
            log(f"resuming from step {resumed} of {plan.steps}")

    packs = pack_rows([row.length for row in held_out], range(len(held_out)), settings.pack_tokens)
    with Termination() as termination:
        trainer = DraftTrainer(
            objective,
            _arguments(settings, folder, plan, validate=bool(held_out), fresh=resumed is None),
            plan,
            RowDataset(training, source, settings.ttt_steps, cut),
            packs,
            RowDataset(held_out, source, settings.ttt_steps, cut),
            termination,
            keep=settings.save_total_limit,
            notes=notes,
        )
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        if termination.asked:
            raise SystemExit(EXIT_TERMINATED)
        if held_out and not any(
            entry["step"] == plan.steps and "eval_loss" in entry for entry in trainer.state.log_history
        ):
            trainer.evaluate()
    if first:
        _write(trainer, plan, draft, report, key=key, layers=stored["layers"], resumed=resumed, params=params)


def fingerprint(
    settings: Train,
    target: dict[str, Any],
    manifest: dict[str, Any],
    rows: list[Row],
    d2t: Tensor,
    dtype: str,
    world_size: int,
) -> str:
    """16 hex digits over everything that changes where a training leads: settings, target, states, rows with their spans, order
    and split, vocabulary, precision, and the number of processes, which decides what one step is made of.
    """
    digest = hashlib.sha256()
    what = {
        "format": _FORMAT,
        "settings": settings.model_dump(mode="json", exclude=_WATCHING),
        "target": target["fingerprint"],
        "states": manifest["fingerprint"],
        "layers": manifest["layers"],
        "dtype": dtype,
        "world_size": world_size,
    }
    digest.update(json.dumps(what, sort_keys=True).encode())
    for row in rows:
        digest.update(f"{row.row_id} {row.length} {row.starts} {row.ends}\n".encode())
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
        torch.set_num_threads(max(1, len(hardware.cores()) // ranks.world_size()))


def _arguments(settings: Train, folder: Path, plan: Plan, validate: bool, fresh: bool) -> TrainingArguments:
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=settings.gradient_accumulation,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=settings.schedule,
        warmup_steps=round(settings.warmup_fraction * plan.steps),
        weight_decay=settings.weight_decay,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        max_grad_norm=settings.max_grad_norm,
        logging_steps=settings.logging_steps,
        logging_first_step=True,
        # compute_loss looks at every loss itself, and ends the training.
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=settings.save_steps,
        eval_strategy="steps" if validate else "no",
        eval_steps=settings.eval_steps if validate else None,
        eval_on_start=validate and fresh,
        seed=settings.seed,
        use_cpu=hardware.device() == "cpu",
        ddp_find_unused_parameters=False,
        # The frozen embedding is a buffer: as large as the draft, and the same everywhere.
        ddp_broadcast_buffers=False,
        remove_unused_columns=False,
        label_names=[],
        dataloader_pin_memory=False,
        disable_tqdm=True,
        log_level="error",
        report_to="none",
    )


def _write(
    trainer: DraftTrainer,
    plan: Plan,
    draft: Path,
    report: Path,
    *,
    key: str,
    layers: list[int],
    resumed: int | None,
    params: int,
) -> None:
    from safetensors.torch import save_file

    history = _history(trainer.state.log_history, plan)
    validated = [entry for entry in history if "eval_loss" in entry]
    final = validated[-1] if validated else {}
    best = min(validated, key=lambda entry: entry["eval_loss"]) if validated else None
    if best is not None and best["step"] < final["step"] and best["eval_loss"] < 0.98 * final["eval_loss"]:
        log(
            f"the validation loss was lowest at step {best['step']} ({best['eval_loss']:.4f}, now {final['eval_loss']:.4f}): "
            "the draft learns its training rows by heart; lower train.epochs or add conversations"
        )
    weights = {
        name: tensor.detach().float().cpu().contiguous()
        for name, tensor in trainer.objective.draft.state_dict().items()
    }
    with atomic_path(draft) as temporary:
        save_file(weights, temporary, metadata={"format": "pt", "fingerprint": key})
    write_json(
        report,
        {
            "fingerprint": key,
            "layers": layers,
            "steps": plan.steps,
            "epochs": round(plan.epoch(plan.steps), 4),
            "params": params,
            "resumed_from": resumed,
            "seconds": round(trainer.seconds, 1),
            "tokens": trainer.tokens,
            "tokens_per_second": round(trainer.tokens / trainer.seconds, 1) if trainer.seconds else None,
            "world_size": ranks.world_size(),
            "best": best,
            "simulated_acceptance_length": final.get("eval_acceptance_length"),
            "accuracy": final.get("eval_accuracy"),
            "acceptance": final.get("eval_acceptance"),
            "history": history,
        },
    )
    log(
        f"trained {plan.steps} steps on {trainer.tokens:,} tokens in {trainer.seconds:.0f} s; simulated acceptance length "
        f"{final['eval_acceptance_length']:.3f}; {draft} written"
        if final
        else f"trained {plan.steps} steps on {trainer.tokens:,} tokens in {trainer.seconds:.0f} s; {draft} written"
    )


def _history(logged: list[dict[str, Any]], plan: Plan) -> list[dict[str, Any]]:
    """One entry a step that was logged or validated, in order, in epochs of rows instead of Trainer's."""
    wanted = ("loss", "accuracy", "learning_rate", "grad_norm", "tokens_per_second")
    steps: dict[int, dict[str, Any]] = {}
    for entry in logged:
        kept = {name: value for name, value in entry.items() if name in wanted or name.startswith("eval_")}
        if kept:
            step = int(entry["step"])
            steps.setdefault(step, {"step": step, "epoch": round(plan.epoch(step), 4)}).update(kept)
    return [steps[step] for step in sorted(steps)]
