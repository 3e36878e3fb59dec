"""The settings as transformers' Trainer takes them."""

from __future__ import annotations

from pathlib import Path

from transformers import TrainingArguments

from draftsmith import hardware
from draftsmith.config import Train
from draftsmith.train_draft import ranks
from draftsmith.train_draft.plan import Plan


def arguments(settings: Train, folder: Path, plan: Plan, validate: bool, fresh: bool) -> TrainingArguments:
    """Arguments for a training along ``plan`` with checkpoints in ``folder``; one that is not ``fresh`` is resumed."""
    sharded = settings.fsdp and ranks.world_size() > 1
    return TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=plan.per_rank(ranks.world_size()),
        learning_rate=settings.learning_rate,
        lr_scheduler_type=settings.schedule,
        warmup_steps=round(settings.warmup_fraction * plan.steps),
        weight_decay=settings.weight_decay,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        max_grad_norm=settings.max_grad_norm,
        logging_steps=settings.logging_steps,
        logging_first_step=True,
        # The trainer logs a mean of its own; this keeps Trainer's sum a number where the guard has left a step out.
        logging_nan_inf_filter=True,
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
        # Sharded as a whole: one layer, whose weights every step of the training-time test takes again.
        fsdp="full_shard" if sharded else None,
        fsdp_config={"version": 2, "auto_wrap_policy": "NO_WRAP", "reshard_after_forward": False} if sharded else None,
        remove_unused_columns=False,
        label_names=[],
        dataloader_pin_memory=False,
        disable_tqdm=True,
        log_level="error",
        report_to="none",
    )
