"""Memory: what the engine's buffers and the draft really take, and the rest by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from targets import DEMO, KIMI, SMOLLM, given

from draftsmith.estimate import extraction, storage, training
from draftsmith.estimate.model import Figure
from draftsmith.extract_shard import plan


def named(figures: list[Figure], name: str) -> int:
    return next(figure.bytes for figure in figures if figure.name == name)


def test_buffers_by_hand(tmp_path: Path) -> None:
    target = given(tmp_path, KIMI, engine={"tp": 8, "max_num_batched_tokens": 16384}, target={"layers": [2, 30, 58]})
    # 128 MiB of 57,344 bytes a token are 2,340 tokens: one row of 2,000 a file.
    packed = storage.batches(target, "target", [2000] * 100, 1)
    assert packed == [[2000]] * 100
    # 12 may be in writing, a step brings 16384 // 2000 = 8 whole ones, one has begun, one is about to.
    assert plan.buffers(16384, 2000, 100) == 12 + 8 + 2
    # Of each 2,000 tokens: states, a 4-byte id, 4 bytes to look at; and two offsets.
    assert named(extraction.on_host(target, packed), "batch buffers") == 22 * (2000 * (57_344 + 4 + 4) + 2 * 8)
    # No more buffers than there are batches.
    assert named(extraction.on_host(target, packed[:3]), "batch buffers") == 3 * (2000 * (57_344 + 4 + 4) + 2 * 8)


def test_kimi_on_eight_h200s(tmp_path: Path) -> None:
    target = given(tmp_path, KIMI, engine={"tp": 8, "gpu_memory_utilization": 0.9}, target={"layers": [2, 30, 58]})
    figures = extraction.on_gpu(target, 4096, 139 * 2**30)
    assert 73e9 < named(figures, "weights") < 75e9
    assert named(figures, "captured states") == 2 * 16384 * 57_344
    assert sum(figure.bytes for figure in figures) == pytest.approx(0.9 * 139 * 2**30, abs=1)
    # Where a GPU's memory is not known, what the longest row needs is all that can be told.
    assert named(extraction.on_gpu(target, 4096, None), "KV cache, at least") == 4096 * 61 * 576 * 2


def test_on_a_cpu_everything_is_on_the_host(tmp_path: Path) -> None:
    target = given(tmp_path, SMOLLM, device="cpu", engine={"kv_cache_gib": 2}, extract={"batch_tokens": 2048})
    assert extraction.on_gpu(target, 512, None) == []
    figures = extraction.on_host(target, storage.batches(target, "target", DEMO["later"]["lengths"], 1))
    assert named(figures, "KV cache") == 2 * 2**30
    assert named(figures, "the target's head") == 49152 * 576 * 4
    # The demo's extraction held 3,982 to 4,069 MiB at its peak.
    assert sum(figure.bytes for figure in figures) == pytest.approx(4069 * 2**20, rel=0.1)


def test_parameters_of_the_draft_are_those_of_the_module(tmp_path: Path) -> None:
    from draftsmith.draft.model import Eagle3Draft

    for settings in ({}, {"fc_norm": True}, {"intermediate_size": 256}):
        target = given(tmp_path, SMOLLM, vocabulary={"size": 4096}, train=settings)
        shape = training.shape(target)
        with torch.device("meta"):
            draft = Eagle3Draft(shape, torch.empty(1, 576))
        assert sum(training.parameters(shape).values()) == sum(weight.numel() for weight in draft.parameters())
    # The demo's, as its train.json tells.
    assert (
        sum(training.parameters(training.shape(given(tmp_path, SMOLLM, vocabulary={"size": 4096}))).values())
        == 7_448_832
    )


def test_training_by_hand(tmp_path: Path) -> None:
    target = given(tmp_path, SMOLLM, vocabulary={"size": 4096}, train={"train_head": False, "save_total_limit": 2})
    shape = training.shape(target)
    figures = training.on_device(target, shape, 1, 0.5)
    head = 4096 * 576
    assert named(figures, "draft") == 4 * 7_448_832
    assert named(figures, "gradients") == 4 * (7_448_832 - head)
    assert named(figures, "optimiser") == 8 * (7_448_832 - head)
    assert named(figures, "the target's embedding and head") == (2 * 49152 + 4096) * 576 * 2 + 8 * 49152
    # Three checkpoints while the third is written, and the best draft.
    assert (
        named(training.on_disk(target, shape), "checkpoints")
        == 3 * (4 * 7_448_832 + 8 * (7_448_832 - head)) + 4 * 7_448_832
    )
    several = training.on_device(target, shape, 4, 0.5)
    assert named(several, "DDP's buckets") == 4 * (7_448_832 - head)
    spread = training.on_device(given(tmp_path, SMOLLM, vocabulary={"size": 4096}, train={"fsdp": True}), shape, 4, 0.5)
    assert named(spread, "optimiser") == 8 * 7_448_832 // 4
    assert all(figure.name != "DDP's buckets" for figure in spread)


def test_activations_grow_with_steps_and_slots_and_logits_do_not(tmp_path: Path) -> None:
    def figures(**train: Any) -> list[Figure]:
        target = given(tmp_path, KIMI, target={"layers": [2, 30, 58]}, train={"pack_tokens": 8192, **train})
        return training.on_device(target, training.shape(target), 1, 0.5)

    seven, one = figures(ttt_steps=7), figures(ttt_steps=1)
    each = named(seven, "activations") - named(one, "activations")
    shape = training.shape(given(tmp_path, KIMI, target={"layers": [2, 30, 58]}))
    assert each == 6 * 4096 * training.kept_per_slot(shape, 2)
    # Only the states' gradients grow: 6 more steps of 8192 x 7168 float32.
    assert named(seven, "logits") - named(one, "logits") == 6 * 8192 * 7168 * 4


def test_what_a_step_keeps_is_what_autograd_keeps(tmp_path: Path) -> None:
    """The bytes that autograd saves for a later step of the training-time test, by its own hooks."""
    from draftsmith.draft.model import Eagle3Draft

    small = SMOLLM | {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    target = given(tmp_path, small, device="cpu", vocabulary={"size": 64})
    shape = training.shape(target)
    draft = Eagle3Draft(shape, torch.randn(49152, 256))
    tokens, counting = 64, 48

    class Rows:
        input_ids = torch.zeros(tokens, dtype=torch.int64)
        positions = torch.arange(1, tokens + 1)
        aux = torch.randn(tokens, 3 * 256)
        slots = torch.arange(counting)
        depth = torch.full((counting,), 9)
        widths, counted, firsts = [tokens], [counting], [0]

    def kept(steps: int) -> int:
        seen: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            held.append(tensor)
            return tensor

        held: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = draft(Rows(), steps)
        weights = {weight.untyped_storage().data_ptr() for weight in draft.parameters()}
        assert outputs
        return sum(size for place, size in seen.items() if place not in weights)

    each = (kept(4) - kept(3)) / counting
    assert each == pytest.approx(training.kept_per_slot(shape, 4), rel=0.3)
