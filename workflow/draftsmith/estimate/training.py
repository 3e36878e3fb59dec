"""Memory of the training: the draft, its optimiser, what teaches it, and what a step keeps for its backward pass."""

from __future__ import annotations

import contextlib
import io
import math
from typing import Any

from draftsmith.draft.config import DraftShape, draft_shape
from draftsmith.estimate.model import Figure
from draftsmith.estimate.storage import per_token
from draftsmith.estimate.target import Subject
from draftsmith.export_draft.checks import attention_tensors

_ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}
# Logits of a block, as draftsmith.draft.loss has them, and how many of its size live at once: the target's distribution, its
# rows that a step learns from, the draft's logits, and their gradient.
_BLOCK = {"cuda": 1 << 27, "cpu": 1 << 25}
_BLOCKS_ALIVE = 4
_PROCESS = int(1.2e9)
_READ_AHEAD = 3


def shape(subject: Subject) -> DraftShape:
    """The draft's shape, by config.json as it stands."""
    size = min(subject.config.vocabulary.size or subject.outline["vocab_size"], subject.outline["vocab_size"])
    described: dict[str, Any] = {**subject.outline, "layers": subject.layers}
    # What it logs about the rope is the training's to say.
    with contextlib.redirect_stderr(io.StringIO()):
        return draft_shape(described, subject.config.train, size, text=subject.text)


def parameters(draft: DraftShape) -> dict[str, int]:
    """Weights of the draft by part; the embedding is the target's and is none of them."""
    width = draft.hidden_size
    return {
        "fc": len(draft.layers) * width * width,
        "attention": sum(math.prod(sizes) for sizes in attention_tensors(draft).values()),
        "mlp": 3 * width * draft.intermediate_size,
        "norms": 4 * width + (len(draft.layers) * width if draft.fc_norm else 0),
        "lm_head": draft.draft_vocab * width,
    }


def on_device(subject: Subject, draft: DraftShape, world: int, supervised: float) -> list[Figure]:
    """What each of ``world`` processes holds where it computes; ``supervised`` is the share of tokens that are."""
    config, parts = subject.config.train, parameters(draft)
    every = sum(parts.values())
    trained = every - (0 if config.train_head else parts["lm_head"])
    vocabulary, width = draft.target_vocab, draft.hidden_size
    plain = _ITEM[subject.checkpoint_dtype]
    # FSDP spreads what is the draft's own; DDP has all of it everywhere, and its buckets besides.
    spread = world if config.fsdp else 1
    over = f" / {spread} processes" if spread > 1 else ""
    listed = " + ".join(f"{name} {count / 1e6:,.1f} M" for name, count in parts.items())
    figures = [
        Figure(name="draft", bytes=4 * every // spread, formula=f"4 bytes x {every:,} parameters{over}: {listed}"),
        Figure(name="gradients", bytes=4 * trained // spread, formula=f"4 bytes x {trained:,} trained parameters{over}"),
        Figure(
            name="optimiser", bytes=8 * trained // spread,
            formula=f"AdamW: 2 x 4 bytes x {trained:,} trained parameters{over}",
        ),
        Figure(
            name="the target's embedding and head", bytes=(2 * vocabulary + draft.draft_vocab) * width * plain + 8 * vocabulary,
            formula=f"(2 x {vocabulary:,} + {draft.draft_vocab:,} of the draft vocabulary) x {width:,} x {plain} bytes, frozen",
        ),
        _activations(subject, draft, supervised),
        _logits(subject, draft),
    ]  # fmt: skip
    if (item := _dtype(subject)) < 4:
        cast = parts["attention"] + parts["mlp"]
        figures.append(
            Figure(
                name="matrices as they are multiplied",
                bytes=2 * item * cast,
                formula=f"{item} bytes x {cast:,}, and as much for their gradients",
            )
        )
    if world > 1 and not config.fsdp:
        figures.append(
            Figure(name="DDP's buckets", bytes=4 * trained, formula=f"4 bytes x {trained:,}, with {world} processes")
        )
    return figures


def _dtype(subject: Subject) -> int:
    asked = subject.config.train.dtype
    return _ITEM[
        "bfloat16" if asked == "auto" and subject.device == "cuda" else "float32" if asked == "auto" else asked
    ]


def kept_per_slot(draft: DraftShape, item: int) -> int:
    """Bytes that a slot keeps for the backward pass of a TTT step, products in ``item`` bytes a number.

    Kept are the inputs of the products (both 2H, attention's output, the normed residual, the MLP's product) and of what lies
    between them in that precision, and the norms' inputs, the residuals and the rotated parts in float32.
    """
    width, heads, keys, inner = (
        draft.hidden_size,
        draft.heads * draft.head_dim,
        draft.kv_heads * draft.head_dim,
        draft.intermediate_size,
    )
    return item * (3 * width + 3 * heads + 4 * keys + 4 * inner) + 4 * (6 * width)


def _activations(subject: Subject, draft: DraftShape, supervised: float) -> Figure:
    config, item = subject.config.train, _dtype(subject)
    each = kept_per_slot(draft, item)
    slots = round(config.pack_tokens * supervised)
    # Step 0 also keeps the captured states, the embedding and the keys of every token of the pack.
    states = len(draft.layers) * draft.hidden_size
    first = config.pack_tokens * (item * (states + 4 * draft.kv_heads * draft.head_dim) + 4 * 4 * draft.hidden_size)
    return Figure(
        name="activations", bytes=config.ttt_steps * slots * each + first,
        formula=f"{config.ttt_steps} TTT steps x {slots:,} slots of a pack ({supervised:.0%} of {config.pack_tokens:,}) x {each:,} bytes + "
        f"{config.pack_tokens:,} tokens x {first // config.pack_tokens:,} bytes",
    )  # fmt: skip


def _logits(subject: Subject, draft: DraftShape) -> Figure:
    config, block = subject.config.train, _BLOCK[subject.device]
    rows = min(config.pack_tokens, max(1, block // draft.draft_vocab))
    states = config.ttt_steps * config.pack_tokens * draft.hidden_size * 4
    head = draft.draft_vocab * draft.hidden_size
    kept = 4 * head + _dtype(subject) * head
    return Figure(
        name="logits", bytes=_BLOCKS_ALIVE * rows * draft.draft_vocab * 4 + states + kept,
        formula=f"{_BLOCKS_ALIVE} x {rows:,} slots of a block x {draft.draft_vocab:,} x 4 bytes (whatever the TTT steps) + gradients of "
        f"{config.ttt_steps} x {config.pack_tokens:,} states x {draft.hidden_size:,} x 4 bytes and of the head",
    )  # fmt: skip


def on_host(subject: Subject, draft: DraftShape, world: int) -> list[Figure]:
    """What all processes hold on the host; on a CPU besides what :func:`on_device` tells."""
    each = per_token(subject, subject.config.extract.storage) + 4
    pack = subject.config.train.pack_tokens * each
    figures = [
        Figure(name="processes", bytes=world * _PROCESS, formula=f"{world} x 1.2 GB with PyTorch and transformers, as measured"),
        Figure(
            name="packs read ahead", bytes=world * _READ_AHEAD * pack,
            formula=f"{world} x {_READ_AHEAD} packs x {subject.config.train.pack_tokens:,} tokens x {each:,} bytes; mapped files of the "
            "store are page cache, which the system takes back",
        ),
    ]  # fmt: skip
    if subject.device == "cuda":
        size = (
            4 * sum(parameters(draft).values())
            + 2 * draft.target_vocab * draft.hidden_size * _ITEM[subject.checkpoint_dtype]
        )
        figures.append(
            Figure(
                name="weights on their way",
                bytes=world * size,
                formula=f"{world} x the draft, the target's embedding and head",
            )
        )
    return figures


def on_disk(subject: Subject, draft: DraftShape) -> list[Figure]:
    """Checkpoints in work/NAME, and the draft in results/NAME."""
    config, parts = subject.config, parameters(draft)
    every = sum(parts.values())
    trained = every - (0 if config.train.train_head else parts["lm_head"])
    count = config.train.save_total_limit + 1
    best = 4 * every
    item = _ITEM[subject.checkpoint_dtype if config.export.dtype == "auto" else config.export.dtype]
    return [
        Figure(
            name="checkpoints", bytes=count * (4 * every + 8 * trained) + best,
            formula=f"(train.save_total_limit {config.train.save_total_limit} + the one being written) x (4 bytes x {every:,} + 8 bytes x {trained:,}) + the best draft",
        ),
        Figure(name="draft", bytes=(4 + item) * every, formula=f"(4 bytes trained + {item} bytes exported) x {every:,}"),
    ]  # fmt: skip
