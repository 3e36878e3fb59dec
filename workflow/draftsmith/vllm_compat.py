"""What differs between vLLM releases (0.26 to 0.33) and between its two model runners; nothing else looks inside vLLM.

tests/unit/test_vllm_compat.py names each interface used here and fails when an installed release has moved it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

SUPPORTED = ("0.26", "0.33")
# How a decoder layer scales what it was handed, in float16 alone.
_SCALED = "residual *= 1.0 / self.routed_scaling_factor"


def version() -> str:
    """The installed release."""
    from vllm import __version__

    return str(__version__)


def worker_class() -> type[Any]:
    """The worker class that vLLM would choose for this machine."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    return Worker


def mend() -> None:
    """What vLLM's CPU backend needs to give right results; call it before ``LLM`` in the same process, from which workers fork."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    pass_over_foreign_objects()
    keep_temperatures_with_a_draft()
    turn_every_head()


def pass_over_foreign_objects() -> None:
    """Let a load survive modules whose objects are not what they seem.

    vLLM 0.32 looks for Triton kernels in every module of the process and takes for granted that what has a ``__dict__`` has
    a dictionary there; llvmlite's handle of its library has not, and Kimi-K2.5's image processor imports it by way of numba.
    """
    try:
        from vllm.triton_utils import dispatcher
    except ImportError:
        # Releases before 0.32 look nowhere.
        return
    dispatcher.vars = _dictionary  # type: ignore[attr-defined]


def _dictionary(value: Any) -> Mapping[str, Any]:
    found = getattr(value, "__dict__", None)
    return found if isinstance(found, Mapping) else {}


def keep_temperatures_with_a_draft() -> None:
    """Let answers that are drawn with a draft have their temperature.

    On a CPU vLLM 0.32 spreads temperature, top_k and top_p over the drafted tokens by a kernel for int64 alone: whatever is of
    another type is written into a copy, and the logits are divided by memory that nobody has set.
    """
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = _spread


def _spread(x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
    """Each request's value [requests] as often as it has tokens, whose running sums are ``cu_num_tokens``: [num_tokens]."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)


def turn_every_head() -> None:
    """Let plain rope turn each head of queries that come as [tokens, heads, d].

    vLLM 0.32's kernel for CPUs reads them as [tokens, heads x d], and turns the first head of each token alone or wrongly; latent
    attention hands them over so. Yarn of DeepSeek's kind has no such kernel.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    if getattr(RotaryEmbedding.forward_cpu, "flattens", False):
        return
    original = RotaryEmbedding.forward_cpu

    def flattened(
        self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        turned = original(
            self, positions, query.reshape(len(query), -1), None if key is None else key.reshape(len(key), -1)
        )
        return turned[0].view(query.shape), None if key is None or turned[1] is None else turned[1].view(key.shape)

    flattened.flattens = True  # type: ignore[attr-defined]
    RotaryEmbedding.forward_cpu = flattened  # type: ignore[method-assign]


def latent_drafts_turn_plainly() -> bool:
    """Whether a draft with latent attention may have plain rope; 0.26 takes any rope of one for yarn. Imports nothing of vLLM."""
    found = find_spec("vllm")
    for place in (found.submodule_search_locations if found else None) or []:
        file = Path(place, "model_executor", "models", "deepseek_eagle3.py")
        if file.is_file():
            return 'rope_params["rope_type"] = "deepseek_yarn"' not in file.read_text()
    return True


def schedules_asynchronously(llm: Any) -> bool:
    """Whether the engine plans the next step before it knows what came of this one."""
    return bool(llm.llm_engine.vllm_config.scheduler_config.async_scheduling)


def tensor_parallel_rank() -> int:
    """This worker's rank in its tensor-parallel group."""
    from vllm.distributed import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def _step_batch(runner: Any) -> Any:
    # V1 keeps one batch that it changes at the start of a step; V2 makes a new one, kept until its tokens are sampled.
    batch = getattr(runner, "input_batch", None)
    if batch is None:
        state = runner.execute_model_state
        batch = state.input_batch if hasattr(state, "input_batch") else state[0]
    return batch


def request_order(runner: Any) -> list[str]:
    """Ids of the step's requests in the order in which their tokens lie in the flat batch; read after execute_model."""
    batch = _step_batch(runner)
    return list(batch.req_ids[: batch.num_reqs])


def input_ids(runner: Any, tokens: int) -> Tensor:
    """Token ids [tokens] that the step's forward was given, on its device."""
    if getattr(runner, "input_batch", None) is None:
        return _step_batch(runner).input_ids[:tokens]
    buffer = runner.input_ids
    return (buffer.gpu if hasattr(buffer, "gpu") else buffer)[:tokens]


def start_positions(scheduler_output: Any) -> dict[str, int]:
    """For each request of the step, the position of its first token in this step."""
    starts = {request.req_id: request.num_computed_tokens for request in scheduler_output.scheduled_new_reqs}
    cached = scheduler_output.scheduled_cached_reqs
    starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return starts


def reads_natively(model: Any, layers: Sequence[int]) -> bool:
    """Whether ``model``, an instance or a class, hands over the states of ``layers`` by vLLM's EAGLE-3 interface."""
    from vllm.model_executor.models.interfaces import supports_eagle3

    # Layer 0 has no residual yet, which DeepSeek's own capture trips over; a hook reads it.
    return bool(supports_eagle3(model)) and 0 not in layers


@dataclass(frozen=True)
class EngineView:
    """What vLLM makes of a target and engine arguments before any weight is loaded; ``configured`` is its VllmConfig."""

    architecture: str
    model: type[Any]
    runner: str
    num_layers: int | None
    hidden_size: int
    configured: Any = None


def engine_view(arguments: Mapping[str, Any]) -> EngineView:
    """Let vLLM check ``arguments`` of its engine and look up the model's class; raises what vLLM raises."""
    from vllm import EngineArgs
    from vllm.model_executor.model_loader.utils import get_model_architecture

    given = dict(arguments)
    if isinstance(given.get("kv_transfer_config"), dict):
        from vllm.config import KVTransferConfig

        # vllm.LLM does the same.
        given["kv_transfer_config"] = KVTransferConfig(**given["kv_transfer_config"])
    configured = EngineArgs(**given).create_engine_config()
    model_config = configured.model_config
    model, architecture = get_model_architecture(model_config)
    return EngineView(
        architecture=architecture,
        model=model,
        runner="V2" if configured.use_v2_model_runner else "V1",
        # Some configs call it otherwise.
        num_layers=getattr(model_config.hf_text_config, "num_hidden_layers", None),
        hidden_size=int(model_config.get_hidden_size()),
        configured=configured,
    )


def model_class(architectures: Sequence[str]) -> type[Any] | None:
    """vLLM's own class for the first of ``architectures`` that it has one for; None when it has none.

    The class is put into vLLM's registry in place of its name: vLLM would otherwise start a process, which imports all
    of vLLM once more, to look at it. Where there is none, those of the Transformers backend are put there.
    """
    from vllm.model_executor.models.registry import ModelRegistry

    known = ModelRegistry.get_supported_archs()
    own = next((name for name in architectures if name in known), None)
    fallback = [name for name in known if name.startswith("Transformers") and name.endswith("ForCausalLM")]
    for name in [own] if own else fallback:
        ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
    return ModelRegistry.models[own].load_model_cls() if own else None


def by_transformers(model: type[Any]) -> bool:
    """Whether the class runs a model by its implementation in transformers, as vLLM has none of its own."""
    return model.__module__.startswith("vllm.model_executor.models.transformers")


def scales_float16(model: type[Any]) -> bool:
    """Whether the class keeps float16 from overflowing by a residual stream that is scaled: its states are then not the model's.

    DeepSeek's classes do, those that are derived from them, and those that have taken over their decoder layer.
    """
    modules = {own.__module__ for own in model.__mro__ if own.__module__.startswith("vllm.")}
    files = [getattr(sys.modules.get(name), "__file__", None) for name in modules]
    return any("deepseek" in name for name in modules) or any(
        _SCALED in Path(file).read_text() for file in files if file is not None
    )


def known_arguments() -> frozenset[str]:
    """Names of the engine arguments of the installed release."""
    from vllm import EngineArgs

    return frozenset(field.name for field in fields(EngineArgs) if field.init)
