"""vLLM's arguments and environment, the same for extraction, regeneration and evaluation."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from draftsmith import hardware
from draftsmith.config import Config
from draftsmith.errors import DraftsmithError
from draftsmith.processes import driver_watch, run_mark

GIB = 1 << 30


def prepare_environment(config: Config, scratch: Path | None = None) -> None:
    """Set what vLLM reads from the environment; call it before the first import of vllm.

    ``scratch`` takes the sockets that vLLM never removes; keep it short, as a socket's path is limited to 107 characters.
    Values that the user has set stay.
    """
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_COLOR": "0",
        "VLLM_CONFIGURE_LOGGING": "1",
        # An 18-minute load must not end as 'engine not ready'.
        "VLLM_ENGINE_READY_TIMEOUT_S": "7200",
        "PYTHONFAULTHANDLER": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if on_cpu(config):
        # One process instead of three: each would import vllm anew, a quarter of a minute each.
        if config.engine.tp == 1:
            defaults["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        binding = hardware.thread_binding()
        # With several ranks the cores are dealt out, one group a rank.
        cores = hardware.cores()
        groups = [cores[rank :: config.engine.tp] or cores for rank in range(config.engine.tp)]
        if config.engine.tp > 1:
            binding = "|".join(",".join(str(core) for core in group) for group in groups)
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = binding
    if scratch is not None:
        scratch.mkdir(parents=True, exist_ok=True)
        # Never an inherited one: the folder of an earlier run is gone.
        os.environ["VLLM_RPC_BASE_PATH"] = str(scratch)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    # Its processes write a title over their environment, so the run's mark has to be in the title.
    os.environ["VLLM_PROCESS_NAME_PREFIX"] = f"{run_mark.MARK}={run_mark.mark_run()}"
    driver_watch.announce()
    # With it vLLM refuses to start or leaks into the KV cache's accounting; a training stage may have set it.
    os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)


def on_cpu(config: Config) -> bool:
    """Whether the engine runs on the CPU."""
    return config.engine.device == "cpu" or hardware.device() == "cpu"


def dummy_weights(config: Config) -> bool:
    """Whether the engine is to invent the weights, as a dry run has it: no checkpoint is read then."""
    return config.engine.args.get("load_format") == "dummy"


def check_granted(config: Config, granted: int | None) -> None:
    """Fail unless as many GPUs were granted as tensor parallelism needs.

    Snakemake silently clips a job's `gpu` to what the profile offers, so the job itself has to look.
    """
    if config.engine.device == "cpu":
        return
    visible = len(hardware.gpus())
    if config.engine.device == "cuda" and not visible:
        raise DraftsmithError(
            f"engine.device is cuda, but this job sees no GPU ({hardware.why_no_gpu()}); ask the scheduler for one, or set engine.device to cpu"
        )
    if config.engine.tp == 1 and hardware.device() == "cpu":
        return
    have = visible if granted is None else min(granted, visible)
    if have < config.engine.tp and granted is not None and granted >= config.engine.tp:
        why = hardware.why_no_gpu()
        raise DraftsmithError(
            f"engine.tp is {config.engine.tp} and this job was granted {granted} GPU(s), but it sees {visible}"
            f"{f' ({why})' if why else ''}; look with nvidia-smi on its node, or set engine.device to cpu"
        )
    if have < config.engine.tp:
        raise DraftsmithError(
            f"engine.tp is {config.engine.tp}, but this job was granted {have} GPU(s); "
            f"offer more (resources: gpu in the profile, or DRAFTSMITH_GPUS) or set engine.tp to {have or 1}"
        )


def vllm_arguments(config: Config, target: dict[str, Any], max_model_len: int) -> dict[str, Any]:
    """Keyword arguments of ``vllm.LLM`` for the target of ``target.json`` and prompts of ``max_model_len`` tokens."""
    engine = config.engine
    cpu = on_cpu(config)
    if target.get("longrope_after"):
        # vLLM turns all rows by the long factors or all by the short ones, by the length that it is told. A server of the
        # model's whole context has the long ones; without this, a row's states would depend on the longest row beside it.
        max_model_len = max(max_model_len, target["longrope_after"] + 1)
    arguments: dict[str, Any] = {
        "model": target["path"],
        "dtype": hardware.target_dtype(config.target.dtype, target.get("torch_dtype")),
        "tensor_parallel_size": engine.tp,
        "trust_remote_code": config.target.trust_remote_code,
        "enforce_eager": engine.enforce_eager,
        "max_model_len": max_model_len,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens or (2048 if cpu else 16384),
        "disable_log_stats": True,
        "worker_cls": "draftsmith.processes.followed_worker.FollowedWorker",
    }
    if cpu:
        arguments["kv_cache_memory_bytes"] = int(engine.kv_cache_gib * GIB)
    else:
        arguments["gpu_memory_utilization"] = engine.gpu_memory_utilization
    if target.get("multimodal"):
        # Conversations are text: the vision tower need not be built.
        arguments["language_model_only"] = True
    return arguments | engine.args
