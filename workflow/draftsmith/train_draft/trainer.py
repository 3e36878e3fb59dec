"""transformers' Trainer, with packs for batches, a loss that is a mean over the whole optimiser step, and safe checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainerState, TrainingArguments

from draftsmith.config import Train
from draftsmith.draft.metrics import Tally
from draftsmith.signals import Termination
from draftsmith.train_draft import best_draft, checkpoints, weights
from draftsmith.train_draft.ahead import Ahead
from draftsmith.train_draft.callbacks import AsSet, OrderlyEnd
from draftsmith.train_draft.dataset import RowDataset
from draftsmith.train_draft.guard import Guard
from draftsmith.train_draft.judge import Judge, best, exhausted, validations
from draftsmith.train_draft.objective import Objective
from draftsmith.train_draft.packing import Pack, collate, empty_pack
from draftsmith.train_draft.plan import Plan, shared_out
from draftsmith.train_draft.progress import ProgressLines


class DraftTrainer(Trainer):
    """Trains an :class:`Objective` along a :class:`Plan`.

    To Trainer the whole training is one epoch of packs in the plan's order, so that a resumed run only has to skip the
    packs it has had: data order, and everything random in it, is the plan's alone.
    """

    objective: Objective

    def __init__(
        self,
        objective: Objective,
        args: TrainingArguments,
        plan: Plan,
        rows: RowDataset,
        validation: list[list[int]],
        validation_rows: RowDataset,
        termination: Termination,
        settings: Train,
        notes: dict[str, Any] | None = None,
    ) -> None:
        """``validation`` are packs of ``validation_rows``; ``notes`` are those of the checkpoint that is resumed from."""
        self.plan, self.rows = plan, rows
        self.validation, self.validation_rows = validation, validation_rows
        self.keep, self.patience = settings.save_total_limit, settings.early_stopping_patience
        self.objective = objective
        notes = notes or {}
        self.seconds = float(notes.get("seconds", 0.0))
        self.waited = float(notes.get("waited", 0.0))
        self.tokens = int(notes.get("tokens", 0))
        self.guard = Guard(settings.on_bad_loss, notes.get("skipped"))
        self._ahead: Ahead | None = None
        self._clock: float | None = None
        self._run_seconds, self._run_waited, self._run_steps = 0.0, 0.0, 0
        self._reported = (0.0, 0)
        self._run_tokens = 0
        self._tally = Tally(objective.steps)
        # The loss of the step that is being computed, and of those to be logged that were not left out, with their number.
        # None and not a zero of the CPU, whose way to the GPU would wait for all that is at work there.
        self._step_loss: Tensor | None = None
        self._kept_loss: Tensor | None = None
        self._kept_steps = 0
        self._looked_at: int | None = None
        super().__init__(
            model=objective,
            args=args,
            train_dataset=rows,
            eval_dataset=validation_rows if validation else None,
            callbacks=[
                ProgressLines(),
                AsSet(),
                Judge(self.save_best, self.patience),
                OrderlyEnd(termination),
            ],
        )
        self.remove_callback(PrinterCallback)
        self._watch_gradients()

    # ---- data ----

    def get_train_dataloader(self) -> DataLoader[int]:
        """This process's packs, in the plan's order; on a GPU they are begun here and ready only when they are asked for."""
        packs = self.plan.of_rank(self.args.process_index, self.args.world_size)
        self._ahead = Ahead(self._read) if self.args.device.type == "cuda" else None
        begin = self._ahead.submit if self._ahead else lambda numbers: {"pack": self._read(numbers)}
        return DataLoader(range(len(self.rows)), batch_sampler=packs, collate_fn=begin)  # type: ignore[arg-type]

    def _read(self, numbers: Sequence[int]) -> Pack:
        """The pack of these rows; one of none where the processes of a step outnumber its packs."""
        return self._pack(self.rows, numbers, pin=self._ahead is not None)

    def _pack(self, rows: RowDataset, numbers: Sequence[int], pin: bool) -> Pack:
        if not numbers:
            shape = self.objective.draft.shape
            return empty_pack(shape.hidden_size, len(shape.layers), self.objective.steps)
        return collate([rows[number] for number in numbers], self.objective.steps, pin=pin)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor]:
        """The packs of one optimiser step, and how many slots count at each step of them on all processes: int64 [steps]."""
        if self._clock is None:
            self._clock = time.monotonic()
        if self._ahead:
            if getattr(self, "_ahead_of", None) is not epoch_iterator:
                self._ahead_of, self._ordered = epoch_iterator, self._ahead.ordered(epoch_iterator)
            epoch_iterator = self._ordered
        asked = time.monotonic()
        packs = [next(epoch_iterator) for _ in range(num_batches)]
        self._run_waited += time.monotonic() - asked
        self._run_steps += 1
        counts = torch.stack([batch["pack"].counts for batch in packs]).sum(0)
        if self.args.world_size > 1:
            counts = counts.to(device)
            torch.distributed.all_reduce(counts)
        return packs, counts.cpu()

    # ---- loss ----

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The share of one pack in the loss of its optimiser step; no number where it is not finite, so that all processes know."""
        pack: Pack = inputs["pack"]
        with_hits = self._reports_next()
        result = model(pack.to(self.args.device), num_items_in_batch, with_hits)
        good = self.guard.look_at_loss(pack, result.loss)
        if with_hits and good:
            self._tally.add(pack, result.sums, result.hits)
        self._run_tokens += pack.tokens
        self._step_loss = _sum(self._step_loss, result.loss.detach())
        # DDP averages gradients over processes; the loss is already a share of all of them.
        loss = result.loss * (self.args.world_size if good else float("nan"))
        return (loss, result) if return_outputs else loss

    def _watch_gradients(self) -> None:
        """Let the guard see each gradient's norm when it has been clipped and before the optimiser takes it."""
        clip = self.accelerator.clip_grad_norm_

        def clip_and_look(*args: Any, **kwargs: Any) -> Any:
            norm = clip(*args, **kwargs)
            whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            if self.guard.look_at_gradient(whole, self.objective, self.state.global_step + 1):
                assert self._step_loss is not None
                self._kept_loss = _sum(self._kept_loss, self._step_loss)
                self._kept_steps += 1
            else:
                self._tally = Tally(self.objective.steps)
            self._step_loss = None
            return whole

        self.accelerator.clip_grad_norm_ = clip_and_look  # type: ignore[method-assign]

    def _reports_next(self) -> bool:
        """Whether the step that is being computed will be logged; only then is its accuracy worth the target's whole head."""
        step = self.state.global_step + 1
        # The state's count is what Trainer logs by.
        return step == 1 or step % int(self.state.logging_steps) == 0

    # ---- validation and reports ----

    def validated_last(self) -> int | None:
        """The step of the last validation; also one of this run that gave no figures."""
        if self._looked_at is not None:
            return self._looked_at
        return next((int(entry["step"]) for entry in reversed(validations(self.state.log_history))), None)

    def ended_early(self, checkpoint: Path | None) -> bool:
        """Whether ``checkpoint`` is the end of a training that stopped early; its state and weights are then taken over."""
        if checkpoint is None:
            return False
        state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        if state.global_step >= self.plan.steps or not exhausted(state.log_history, self.patience):
            return False
        self.state = state
        self.objective.load_state_dict(load_file(checkpoint / "model.safetensors"))
        return True

    def evaluate(  # type: ignore[override]
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, Any]:
        """Loss, accuracy per step and simulated acceptance length on the validation rows, logged and returned.

        Packs with stored states that are not finite are left out, or end the training, by the guard's policy; where nothing is
        left, or the draft itself gives no finite loss, there are no figures.
        """
        self._stop_clock()
        tally = Tally(self.objective.steps)
        self.objective.eval()
        with torch.no_grad():
            for numbers in shared_out(self.validation, self.args.process_index, self.args.world_size):
                pack = self._pack(self.validation_rows, numbers, pin=False)
                result = self.objective(pack.to(self.args.device), pack.counts, True)
                if self.guard.look_at_validation(pack, result.sums):
                    tally.add(pack, result.sums, result.hits)
        left_out, sound = self.guard.end_validation(self.state.global_step)
        self._looked_at = self.state.global_step
        logged: dict[str, Any] = {}
        if tally.reduce(self.args.device).counted() and sound:
            metrics = tally.metrics(self.objective.decay) | ({"rows_left_out": left_out} if left_out else {})
            logged = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
            self.log(dict(logged))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, logged)
        return logged

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Add accuracy, speed and the time left to a training step's report."""
        if "loss" in logs:
            self._stop_clock()
            self._tally.tokens = self._run_tokens
            tally = self._tally.reduce(self.args.device)
            seconds, tokens = self._run_seconds, tally.tokens
            self._report_kept(logs, tally)
            logs["tokens_per_second"] = (tokens - self._reported[1]) / max(seconds - self._reported[0], 1e-9)
            logs["seconds_left"] = seconds / max(self._run_steps, 1) * (self.state.max_steps - self.state.global_step)
            self._reported = (seconds, tokens)
            self._tally = Tally(self.objective.steps)
        super().log(logs, start_time)

    def _report_kept(self, logs: dict[str, Any], tally: Tally) -> None:
        """Put loss and accuracy of the steps that were not left out into ``logs``, where there are any."""
        if tally.counted():
            logs["accuracy"] = tally.accuracy()
        if not math.isfinite(logs.get("grad_norm", 0.0)):
            del logs["grad_norm"]
        total, steps = self._kept_loss, self._kept_steps
        self._kept_loss, self._kept_steps = None, 0
        if total is None:
            del logs["loss"]
            return
        if self.args.world_size > 1:
            total = total.to(self.args.device, copy=True)
            torch.distributed.all_reduce(total)
        logs["loss"] = float(total) / steps

    def _stop_clock(self) -> None:
        """Stop counting until the next step begins: validation and checkpoints are no training time."""
        if self._clock is not None:
            self._run_seconds += time.monotonic() - self._clock
            self._clock = None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer has it; afterwards :attr:`seconds`, :attr:`waited` and :attr:`tokens` cover this run and those that it continues."""
        try:
            result = super().train(*args, **kwargs)
        finally:
            if self._ahead:
                self._ahead.close()
        self._stop_clock()
        totals = self._totals()
        self.seconds, self.waited, self.tokens = totals["seconds"], totals["waited"], totals["tokens"]
        return result

    def _totals(self) -> dict[str, Any]:
        """Seconds spent in training steps, those of them waiting for packs, and tokens of all processes, since step 0."""
        tally = Tally(self.objective.steps)
        tally.tokens = self._run_tokens
        return {
            "seconds": self.seconds + self._run_seconds,
            "waited": self.waited + self._run_waited,
            "tokens": self.tokens + tally.reduce(self.args.device).tokens,
        }

    # ---- checkpoints ----

    def save_best(self, step: int) -> None:
        """Keep the draft's weights, whole, as the best so far; all processes take part and the first one writes."""
        whole = weights.whole(self.objective.draft)
        if self.args.should_save:
            folder = Path(str(self.args.output_dir))
            with weights.told(best_draft.path_of(folder, step), step, folder):
                best_draft.keep(whole, folder, step)
                best_draft.forget(folder, step)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The objective's weights as safetensors, as Trainer loads them; nothing else, and no pickle of the arguments."""
        whole = weights.whole(self.objective)
        if self.args.should_save:
            weights.write(whole, Path(output_dir or str(self.args.output_dir)) / "model.safetensors", {})

    def _get_output_dir(self, trial: Any) -> str:
        # Trainer makes the checkpoint's folder in this one; under its own name it appears when it is complete.
        return str(Path(str(self.args.output_dir)) / checkpoints.STAGING)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save as Trainer does, then publish the folder and drop the oldest ones."""
        self._stop_clock()
        folder = Path(str(self.args.output_dir))
        staged = folder / checkpoints.STAGING / f"checkpoint-{self.state.global_step}"
        step, top = self.state.global_step, best(self.state.log_history)
        noted = self._totals() | {"packs_per_step": self.plan.group, "skipped": self.guard.skipped}
        noted |= {"fingerprint": folder.name, "step": step}
        with weights.told(folder, step, folder):
            staged.mkdir(parents=True, exist_ok=True)
            super()._save_checkpoint(model, trial)
            # Every process has written its random state when this returns.
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                checkpoints.publish(staged, folder, noted)
                checkpoints.keep_newest(folder, self.keep, step)
                best_draft.forget(folder, None if top is None else int(top["step"]))


def _sum(total: Tensor | None, more: Tensor) -> Tensor:
    return more if total is None else total + more
