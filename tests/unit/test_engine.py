"""vLLM's arguments, and what is refused before a load."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from draftsmith import engine, hardware
from draftsmith.config import Config, parse
from draftsmith.errors import DraftsmithError

TARGET = {"path": "/models/x", "torch_dtype": "bfloat16", "multimodal": False}
H200 = hardware.Gpu("0", "H200", 141 << 30, 0)


def config(**sections: object) -> Config:
    return parse(sections, "test")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[hardware.Gpu]:
    present: list[hardware.Gpu] = []
    monkeypatch.setattr(hardware, "gpus", lambda: tuple(present))
    return present


@pytest.mark.parametrize(("present", "granted", "have"), [(0, 0, 0), (0, None, 0), (4, 4, 4), (8, 4, 4)])
def test_fewer_gpus_than_tensor_parallelism_needs(
    gpus: list[hardware.Gpu], present: int, granted: int | None, have: int
) -> None:
    gpus += [H200] * present
    with pytest.raises(
        DraftsmithError, match=rf"engine\.tp is 8, but this job was granted {have} GPU.*set engine\.tp to {have or 1}"
    ):
        engine.check_granted(config(engine={"tp": 8}), granted)


@pytest.mark.parametrize(("present", "said"), [(0, r"it sees 0 \(.+\); look"), (3, r"it sees 3; look")])
def test_gpus_that_were_granted_and_are_not_seen(gpus: list[hardware.Gpu], present: int, said: str) -> None:
    """As on a node whose driver is gone: asking the scheduler for more would not help."""
    gpus += [H200] * present
    with pytest.raises(DraftsmithError, match=rf"engine\.tp is 8 and this job was granted 8 GPU\(s\), but {said}"):
        engine.check_granted(config(engine={"tp": 8}), 8)


def test_enough_gpus_or_none_needed(gpus: list[hardware.Gpu]) -> None:
    engine.check_granted(config(), 0)
    engine.check_granted(config(engine={"tp": 2, "device": "cpu"}), 0)
    gpus += [H200] * 8
    engine.check_granted(config(engine={"tp": 8}), 8)


def test_arguments_follow_the_hardware(gpus: list[hardware.Gpu]) -> None:
    on_cpu = engine.vllm_arguments(config(engine={"kv_cache_gib": 0.5}), TARGET, 100)
    assert (on_cpu["dtype"], on_cpu["kv_cache_memory_bytes"], on_cpu["max_num_batched_tokens"]) == (
        "float32",
        1 << 29,
        2048,
    )
    assert "gpu_memory_utilization" not in on_cpu
    gpus.append(H200)
    on_gpu = engine.vllm_arguments(config(), TARGET | {"multimodal": True}, 100)
    assert (on_gpu["dtype"], on_gpu["gpu_memory_utilization"], on_gpu["max_num_batched_tokens"]) == (
        "bfloat16",
        0.9,
        16384,
    )
    assert on_gpu["language_model_only"] is True
    assert "kv_cache_memory_bytes" not in on_gpu


def test_arguments_of_ones_own_win(gpus: list[hardware.Gpu]) -> None:
    made = engine.vllm_arguments(config(engine={"args": {"dtype": "float16", "seed": 3}}), TARGET, 100)
    assert (made["dtype"], made["seed"]) == ("float16", 3)


def test_environment(gpus: list[hardware.Gpu], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The user's values stay; a scratch folder is always this run's, as an inherited one may be gone."""
    for name in ("VLLM_ENGINE_READY_TIMEOUT_S", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "0")
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "/gone")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setattr(hardware, "cores", lambda: [0, 1, 4, 5])
    engine.prepare_environment(config(engine={"tp": 2, "device": "cpu"}), tmp_path)
    assert os.environ["VLLM_NO_USAGE_STATS"] == "0"
    assert os.environ["VLLM_RPC_BASE_PATH"] == str(tmp_path)
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0,4|1,5"
    assert os.environ["VLLM_ENGINE_READY_TIMEOUT_S"] == "7200"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in os.environ
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ


def test_a_longrope_target_is_always_told_more_than_its_original_length(gpus: list[hardware.Gpu]) -> None:
    target = TARGET | {"longrope_after": 4096}
    lengths = [engine.vllm_arguments(config(), target, length)["max_model_len"] for length in (100, 4096, 5000)]
    assert lengths == [4097, 4097, 5000]
    given = config(engine={"args": {"max_model_len": 2048}})
    assert engine.vllm_arguments(given, target, 100)["max_model_len"] == 2048, "who serves it short says so"
    assert engine.vllm_arguments(config(), TARGET | {"longrope_after": None}, 100)["max_model_len"] == 100
