"""A run folder with a tiny target, a store of learnable states, and what the earlier stages wrote."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors.torch import save_file

from batch_bytes import batch_bytes
from draftsmith import store, train_draft
from draftsmith.config import Config, parse
from draftsmith.files import read_json

VOCAB, WIDTH, LAYERS = 48, 32, [1, 2, 3]


@dataclass
class RunFolder:
    """Paths of a run, and the stage called on them."""

    folder: Path
    row_ids: list[str]

    def config(self, **train: Any) -> Config:
        """Settings of a training of seconds; ``train`` overrides them."""
        settings = {
            "ttt_steps": 2,
            "epochs": 2,
            "pack_tokens": 64,
            "learning_rate": 5e-3,
            "save_steps": 5,
            "eval_steps": 5,
            "logging_steps": 1,
        }
        return parse({"train": settings | train, "tokenize": {"max_length": 32}}, "test")

    def train(self, out: str = "out", workdir: str = "work", **train: Any) -> dict[str, Any]:
        """Run the stage; its report."""
        train_draft.run(self.config(**train), **self.paths(out, workdir))
        return dict(read_json(self.folder / out / "train.json"))

    def paths(self, out: str = "out", workdir: str = "work") -> dict[str, Path]:
        """Arguments of the stage."""
        return {
            "target": self.folder / "target.json",
            "rows": self.folder / "rows.parquet",
            "manifest": self.folder / "manifest.json",
            "vocabulary": self.folder / "vocabulary.safetensors",
            "workdir": self.folder / workdir,
            "draft": self.folder / out / "draft.safetensors",
            "report": self.folder / out / "train.json",
        }

    def checkpoints(self, workdir: str = "work") -> list[Path]:
        """Checkpoint folders, by step."""
        found = (self.folder / workdir).glob("*/checkpoint-*")
        return sorted(found, key=lambda path: int(path.name.split("-")[1]))


def write_batch(
    folder: Path, ids: Sequence[np.ndarray], aux: torch.Tensor, final: torch.Tensor
) -> dict[str, list[Any]]:
    """Write a batch file as the store defines it; its part of the manifest."""
    rows = [store.row_id(row) for row in ids]
    offsets = np.cumsum([0] + [len(row) for row in ids])
    header = store.BatchHeader(
        fingerprint=folder.name,
        target="tiny",
        layers=LAYERS,
        dtype="float32",
        hidden_size=WIDTH,
        rows=rows,
        lengths=[len(row) for row in ids],
        checksums=[
            store.checksum(aux[start:end].numpy(), final[start:end].numpy()) for start, end in pairwise(offsets)
        ],
        vllm="0",
    )
    tensors = {
        "aux": aux,
        "final": final,
        "offsets": torch.from_numpy(offsets.astype("<i8")),
        "token_ids": torch.from_numpy(np.concatenate(ids).astype("<i4")),
    }
    folder.mkdir(parents=True, exist_ok=True)
    name = store.batch_name(rows)
    (folder / name).write_bytes(batch_bytes(header, tensors))
    return {row: [name, place] for place, row in enumerate(rows)}


def make(
    folder: Path, edit: Callable[[int, torch.Tensor, torch.Tensor], None] | None = None, validation: int = 3
) -> RunFolder:
    """A run folder in ``folder``, of 16 training rows of 20 to 32 tokens and ``validation`` more, each half supervised.

    The target always says token (3 t + 1) mod 48 after t, its answers follow that rule, and half of the tokens are in the
    draft vocabulary, so that a draft can learn something in seconds. ``edit`` may change states (aux, final), by row number.
    """
    random = np.random.default_rng(0)
    torch.manual_seed(0)
    weights = {"model.embed_tokens.weight": torch.randn(VOCAB, WIDTH), "lm_head.weight": torch.randn(VOCAB, WIDTH)}
    target = folder / "tiny"
    target.mkdir()
    save_file(weights, target / "model.safetensors")
    config = {
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
    }
    (target / "config.json").write_text(json.dumps(config))
    (folder / "target.json").write_text(
        json.dumps(
            {
                "source": "tiny",
                "revision": None,
                "path": str(target),
                "model_type": "llama",
                "architectures": ["LlamaForCausalLM"],
                "num_layers": 6,
                "hidden_size": WIDTH,
                "vocab_size": VOCAB,
                "torch_dtype": "bfloat16",
                "fingerprint": "f" * 64,
                "trust_remote_code": False,
            }
        )
    )
    rows, ids, aux, final = [], [], [], []
    mixing = torch.randn(len(LAYERS), WIDTH, WIDTH) / WIDTH**0.5
    for number in range(16 + validation):
        length = int(random.integers(20, 33))
        tokens = np.empty(length, dtype="<i4")
        tokens[0] = random.integers(VOCAB)
        for place in range(1, length):
            tokens[place] = (3 * tokens[place - 1] + 1) % VOCAB if place > 8 else random.integers(VOCAB)
        following = torch.from_numpy((3 * tokens.astype(np.int64) + 1) % VOCAB)
        states = torch.einsum("lij,tj->tli", mixing, weights["model.embed_tokens.weight"][following])
        last = weights["lm_head.weight"][following] * 0.5
        if edit is not None:
            edit(number, states, last)
        ids.append(tokens)
        aux.append(states)
        final.append(last)
        rows.append(
            {
                "row_id": store.row_id(tokens),
                "conversation_id": str(number),
                "source": "s",
                "domain": "d",
                "split": "validation" if number >= 16 else "train",
                "input_ids": tokens,
                "span_starts": np.array([length // 2], dtype=np.int32),
                "span_ends": np.array([length], dtype=np.int32),
                "length": length,
                "supervised": length - length // 2,
            }
        )
    pd.DataFrame(rows).to_parquet(folder / "rows.parquet")
    states_folder = folder / "store" / ("0" * 16)
    manifest = {
        "format": 1,
        "store": str(states_folder),
        "fingerprint": states_folder.name,
        "layers": LAYERS,
        "dtype": "float32",
        "hidden_size": WIDTH,
        "rows": write_batch(states_folder, ids, torch.cat(aux), torch.cat(final)),
        "failed": [],
        "bytes": 0,
        "tokens": sum(map(len, ids)),
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    kept = torch.arange(0, VOCAB, 2)
    save_file({"d2t": kept - torch.arange(len(kept))}, folder / "vocabulary.safetensors")
    return RunFolder(folder, [row["row_id"] for row in rows])


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """No file of this process grows beyond ``size`` bytes: the kernel's own refusal, in whichever library is writing."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
