"""What takes vLLM's place where a job was granted eight GPUs that are not there: transformers on the CPU, one row at a time.

All else is the product's own: the driver, what it does on SIGTERM, the publisher with its check of every batch, the store.
DRAFTSMITH_STAND_IN (JSON) makes it slow (``seconds`` a batch), lets it fail (``fails``: how many starts of it), or lets it
hang over the third batch until it is told to stop (``hangs``: how many starts of it).
"""

from __future__ import annotations

import json
import os
import time
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from batch_bytes import batch_bytes
from draftsmith import store
from draftsmith.log import log

ASKED = json.loads(os.environ.get("DRAFTSMITH_STAND_IN", "{}"))


class StandIn:
    """As much of :class:`draftsmith.extract_shard.session.Session` as the driver calls."""

    killed = None
    buffered_bytes = 0

    def __init__(self, config: Any, target: dict[str, Any], staging: Path, longest: int) -> None:
        self.config, self.target, self.staging = config, target, staging
        self.errors, self.running, self.seconds = staging / "errors", {}, {"load": 0.0}
        self.attached = {"method": "stand-in", "runner": "transformers", "async_scheduling": False}

    def __enter__(self) -> StandIn:
        import torch
        from transformers import AutoModelForCausalLM

        visible = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        assert len(set(visible)) == self.config.engine.tp, visible
        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(self.target["path"], dtype=torch.float32).eval()
        log(f"extract: a stand-in engine on GPUs {visible} of {os.environ.get('SLURMD_NODENAME')}")
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def attach(self, key: str, stored: tuple[str, Any], batches: Any) -> None:
        self.key, self.stored = key, stored
        marks = Path(self.config.extract.store, "stand-in-starts")
        marks.mkdir(exist_ok=True)
        (marks / f"{os.environ['SLURM_JOB_ID']}-{os.getpid()}").touch()
        starts = len(list(marks.iterdir()))
        if starts <= ASKED.get("fails", 0):
            raise AssertionError
        self.hangs = starts <= ASKED.get("hangs", 0)

    def feed(self, batches: Any, tokens: Any, publisher: Any, progress: Any, stop: Any, at_once: int) -> dict[str, Any]:
        progress.expect(sum(map(len, batches)), sum(row.length for batch in batches for row in batch))
        for number, batch in enumerate(batches, 1):
            if reason := stop():
                log(f"extract: {reason}: no new batch is begun")
                break
            log(f"extract: a batch of {len(batch)} rows")
            end = time.monotonic() + ASKED.get("seconds", 0.0)
            while time.monotonic() < end or (self.hangs and number == 3 and not stop()):
                time.sleep(0.05)
            self._write([row.row_id for row in batch], [tokens[row.row_id] for row in batch], publisher)
            for row in batch:
                progress.add(row.length)
            publisher.settle()
        return {}

    def _write(self, rows: list[str], ids: list[list[int]], publisher: Any) -> None:
        import torch

        aux, final = [], []
        with torch.no_grad():
            for row, tokens in zip(rows, ids, strict=True):
                made = self.model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
                aux.append(torch.stack([made.hidden_states[layer][0] for layer in self.target["layers"]], dim=1))
                final.append(made.hidden_states[-1][0])
                publisher.sampled[row] = int(made.logits[0, -1].argmax())
        tensors = {
            "aux": torch.cat(aux), "final": torch.cat(final),
            "offsets": torch.tensor(list(accumulate(map(len, ids), initial=0))),
            "token_ids": torch.tensor([token for tokens in ids for token in tokens], dtype=torch.int32),
        }  # fmt: skip
        ends = tensors["offsets"].tolist()
        parts = [slice(start, end) for start, end in pairwise(ends)]
        dtype, storage = self.stored
        header = store.BatchHeader(
            fingerprint=self.key, target=self.target["fingerprint"], layers=self.target["layers"], dtype=dtype, storage=storage,
            hidden_size=self.target["hidden_size"], rows=rows, lengths=[len(tokens) for tokens in ids],
            checksums=[store.checksum(*store.row_parts(tensors, part)) for part in parts], vllm="0",
        )  # fmt: skip
        temporary = self.staging / "open.tmp"
        temporary.write_bytes(batch_bytes(header, tensors))
        temporary.replace(self.staging / store.batch_name(rows))
