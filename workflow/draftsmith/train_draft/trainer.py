"""transformers' Trainer, with packs for batches, a loss that is a mean over the whole optimiser step, and safe checkpoints."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from draftsmith.draft.metrics import Tally
from draftsmith.errors import DraftsmithError
from draftsmith.log import log
from draftsmith.signals import Termination
from draftsmith.train_draft import checkpoints
from draftsmith.train_draft.dataset import Example, RowDataset
from draftsmith.train_draft.objective import Objective
from draftsmith.train_draft.packing import Pack, Plan, collate
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
        keep: int,
        notes: dict[str, Any] | None = None,
    ) -> None:
        """``validation`` are packs of ``validation_rows``; ``notes`` are those of the checkpoint that is resumed from."""
        self.plan, self.rows = plan, rows
        self.validation, self.validation_rows = validation, validation_rows
        self.keep = keep
        self.objective = objective
        self.seconds = float((notes or {}).get("seconds", 0.0))
        self.tokens = int((notes or {}).get("tokens", 0))
        self._clock: float | None = None
        self._run_seconds, self._run_steps = 0.0, 0
        self._reported = (0.0, 0)
        self._run_tokens = 0
        self._tally = Tally(objective.steps)
        super().__init__(
            model=objective,
            args=args,
            train_dataset=rows,
            eval_dataset=validation_rows if validation else None,
            callbacks=[ProgressLines(), _OrderlyEnd(termination)],
        )
        self.remove_callback(PrinterCallback)

    # ---- data ----

    def get_train_dataloader(self) -> DataLoader[Example]:
        """This process's packs, in the plan's order."""
        packs = self.plan.of_rank(self.args.process_index, self.args.world_size)
        return DataLoader(self.rows, batch_sampler=packs, collate_fn=self._collate)  # type: ignore[arg-type]

    def _collate(self, examples: list[Example]) -> dict[str, Pack]:
        return {"pack": collate(examples, self.objective.steps)}

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor]:
        """The packs of one optimiser step, and how many slots count at each step of them on all processes: int64 [steps]."""
        if self._clock is None:
            self._clock = time.monotonic()
        if device.type == "cuda":
            epoch_iterator = self._read_ahead(epoch_iterator)
        packs = [next(epoch_iterator) for _ in range(num_batches)]
        self._run_steps += 1
        counts = torch.stack([batch["pack"].counts for batch in packs]).sum(0)
        if self.args.world_size > 1:
            counts = counts.to(device)
            torch.distributed.all_reduce(counts)
        return packs, counts.cpu()

    def _read_ahead(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Read the next packs in a thread while the GPU works; threads, because packs would fill a container's /dev/shm."""
        if getattr(self, "_ahead_of", None) is not iterator:
            self._ahead_of, self._ahead = iterator, _ahead(iterator)
        return self._ahead

    # ---- loss ----

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The share of one pack in the loss of its optimiser step.

        Raises :class:`DraftsmithError` that names the rows when it is not finite.
        """
        pack: Pack = inputs["pack"]
        with_hits = self._reports_next()
        result = model(pack.to(self.args.device), num_items_in_batch, with_hits)
        if not torch.isfinite(result.loss):
            raise DraftsmithError(self._not_finite(pack, result.loss.item()))
        if with_hits:
            self._tally.add(pack.depth, result.sums, result.hits)
        self._run_tokens += pack.tokens
        # DDP averages gradients over processes; the loss is already a share of all of them.
        loss = result.loss * self.args.world_size
        return (loss, result) if return_outputs else loss

    def _reports_next(self) -> bool:
        """Whether the step that is being computed will be logged; only then is its accuracy worth the target's whole head."""
        step = self.state.global_step + 1
        return step == 1 or step % int(self.args.logging_steps) == 0

    def _not_finite(self, pack: Pack, loss: float) -> str:
        bad, key, entry = [], 0, 0
        for row, width, counted in zip(pack.row_ids, pack.widths, pack.counted, strict=True):
            states = (pack.aux[key : key + width], pack.final[entry : entry + counted])
            if not all(bool(torch.isfinite(part).all()) for part in states):
                bad.append(row)
            key, entry = key + width, entry + counted
        what = f"training step {self.state.global_step + 1}: the loss is {loss}"
        if bad:
            return (
                f"{what}, because the stored states of these rows are not finite: {', '.join(bad)}; "
                "delete their batch files and run extract_shard again"
            )
        return (
            f"{what}, though the states of its rows are finite (rows {', '.join(pack.row_ids)}): "
            "training has diverged; lower train.learning_rate"
        )

    # ---- validation and reports ----

    def evaluate(  # type: ignore[override]
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, Any]:
        """Loss, accuracy per step and simulated acceptance length on the validation rows, logged and returned."""
        self._stop_clock()
        tally = Tally(self.objective.steps)
        self.objective.eval()
        with torch.no_grad():
            for number in self.validation[self.args.process_index :: self.args.world_size]:
                pack = collate([self.validation_rows[row] for row in number], self.objective.steps)
                result = self.objective(pack.to(self.args.device), pack.counts, True)
                tally.add(pack.depth, result.sums, result.hits)
        metrics = tally.reduce(self.args.device).metrics(self.objective.decay)
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
            logs["accuracy"] = tally.accuracy()
            logs["tokens_per_second"] = (tokens - self._reported[1]) / max(seconds - self._reported[0], 1e-9)
            logs["seconds_left"] = seconds / max(self._run_steps, 1) * (self.state.max_steps - self.state.global_step)
            self._reported = (seconds, tokens)
            self._tally = Tally(self.objective.steps)
        super().log(logs, start_time)

    def _stop_clock(self) -> None:
        """Stop counting until the next step begins: validation and checkpoints are no training time."""
        if self._clock is not None:
            self._run_seconds += time.monotonic() - self._clock
            self._clock = None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer has it; afterwards :attr:`seconds` and :attr:`tokens` cover this run and those that it continues."""
        result = super().train(*args, **kwargs)
        self._stop_clock()
        self.seconds, self.tokens = self._totals()
        return result

    def _totals(self) -> tuple[float, int]:
        """Seconds spent in training steps and tokens trained on, by all processes, since step 0."""
        tally = Tally(self.objective.steps)
        tally.tokens = self._run_tokens
        return self.seconds + self._run_seconds, self.tokens + tally.reduce(self.args.device).tokens

    # ---- checkpoints ----

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The draft's weights as safetensors; nothing else, and no pickle of the arguments."""
        if self.args.should_save:
            folder = Path(output_dir or str(self.args.output_dir))
            folder.mkdir(parents=True, exist_ok=True)
            weights = {name: tensor.contiguous() for name, tensor in self.objective.state_dict().items()}
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save as Trainer does, then declare the folder complete and drop the oldest ones."""
        self._stop_clock()
        folder = Path(str(self.args.output_dir))
        checkpoint = folder / f"checkpoint-{self.state.global_step}"
        super()._save_checkpoint(model, trial)
        seconds, tokens = self._totals()
        # Every process has written its random state when this returns.
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            checkpoints.finish(checkpoint, {"seconds": seconds, "tokens": tokens})
            checkpoints.keep_newest(folder, self.keep)


class _OrderlyEnd(TrainerCallback):
    """Turns a SIGTERM into a checkpoint and the end of training, on all processes at the same step."""

    def __init__(self, termination: Termination) -> None:
        self.termination = termination

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """Ask for a checkpoint and the end, once any process has been told to leave."""
        asked = self.termination.asked
        if args.world_size > 1:
            flag = torch.tensor(float(asked), device=args.device)
            torch.distributed.all_reduce(flag)
            asked = self.termination.asked = bool(flag > 0)
        if asked:
            if state.is_world_process_zero:
                log(f"SIGTERM: saving a checkpoint at step {state.global_step}, then leaving")
            control.should_save = control.should_training_stop = True
            # The time until SIGKILL is for the checkpoint.
            control.should_evaluate = False
        return control


def _ahead(iterator: Iterator[Any], depth: int = 2) -> Iterator[Any]:
    """Items of ``iterator``, up to ``depth`` of them read early by one thread and put into page-locked memory."""
    end = object()

    def read() -> Any:
        batch: Any = next(iterator, end)
        return end if batch is end else {"pack": batch["pack"].pin_memory()}

    with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as pool:
        waiting: list[Future[Any]] = [pool.submit(read) for _ in range(depth)]
        while (batch := waiting.pop(0).result()) is not end:
            waiting.append(pool.submit(read))
            yield batch
