"""The interfaces of vLLM that the workflow leans on, each by name: a release that moves one fails here and not after a load."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
import types
from types import SimpleNamespace

import pytest
import torch

from draftsmith import vllm_compat

vllm = pytest.importorskip("vllm")


def test_model_runners_have_what_the_extension_wraps() -> None:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as V1

    for runner in (V1, V2):
        for method in ("execute_model", "sample_tokens", "get_model"):
            assert callable(getattr(runner, method)), f"{runner} has no {method}"
        assert list(inspect.signature(runner.execute_model).parameters)[:2] == ["self", "scheduler_output"]


def test_the_schedulers_output_tells_lengths_and_starts() -> None:
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

    fields = set(SchedulerOutput.__annotations__)
    assert {
        "scheduled_new_reqs",
        "scheduled_cached_reqs",
        "num_scheduled_tokens",
        "total_num_scheduled_tokens",
    } <= fields
    assert {"req_id", "num_computed_tokens"} <= set(NewRequestData.__annotations__)
    assert {"req_ids", "num_computed_tokens"} <= set(CachedRequestData.__annotations__)


def test_batches_name_their_requests() -> None:
    from vllm.v1.worker.gpu.input_batch import InputBatch as V2
    from vllm.v1.worker.gpu_input_batch import InputBatch as V1

    assert {"req_ids", "num_reqs", "input_ids"} <= set(V2.__annotations__)
    assert isinstance(V1.req_ids, property)
    assert isinstance(V1.num_reqs, property)


def test_models_offer_the_eagle3_interface() -> None:
    from vllm.model_executor.models.interfaces import supports_eagle3
    from vllm.model_executor.models.llama import LlamaForCausalLM
    from vllm.model_executor.models.mixtral import MixtralForCausalLM

    assert supports_eagle3(LlamaForCausalLM)
    assert list(inspect.signature(LlamaForCausalLM.set_aux_hidden_state_layers).parameters)[:2] == ["self", "layers"]
    assert not supports_eagle3(MixtralForCausalLM), "Mixtral has learnt it: the hooks need another example"


def test_the_engine_is_fed_by_steps() -> None:
    from vllm import LLM
    from vllm.v1.engine.llm_engine import LLMEngine

    assert list(inspect.signature(LLMEngine.add_request).parameters)[1:4] == ["request_id", "prompt", "params"]
    assert callable(LLMEngine.step)
    assert callable(LLM.collective_rpc)
    assert callable(LLM.get_metrics)
    assert "worker_extension_cls" in inspect.signature(vllm.EngineArgs).parameters
    from vllm.distributed import get_tensor_model_parallel_rank

    assert callable(get_tensor_model_parallel_rank)


def test_a_class_is_looked_up_without_weights() -> None:
    """Of the registry: names, and classes that take the place of a name, so that vLLM starts no process to look at one."""
    from vllm.model_executor.models.llama import LlamaForCausalLM
    from vllm.model_executor.models.registry import ModelRegistry

    assert {"LlamaForCausalLM", "TransformersForCausalLM"} <= set(ModelRegistry.get_supported_archs())
    assert vllm_compat.model_class(["NopeForCausalLM", "LlamaForCausalLM"]) is LlamaForCausalLM
    assert vllm_compat.model_class(["NopeForCausalLM"]) is None
    transformers = ModelRegistry.models["TransformersForCausalLM"].load_model_cls()
    assert vllm_compat.by_transformers(transformers)
    assert not vllm_compat.by_transformers(LlamaForCausalLM)


def test_how_states_are_read_is_known_from_the_class() -> None:
    from vllm.model_executor.models.llama import LlamaForCausalLM
    from vllm.model_executor.models.mixtral import MixtralForCausalLM

    assert vllm_compat.reads_natively(LlamaForCausalLM, [1, 2])
    assert not vllm_compat.reads_natively(LlamaForCausalLM, [0, 2])
    assert not vllm_compat.reads_natively(MixtralForCausalLM, [1, 2])


def test_the_engines_arguments_are_checked_without_weights() -> None:
    from vllm.config import KVTransferConfig, ModelConfig, VllmConfig
    from vllm.model_executor.model_loader.utils import get_model_architecture

    assert {"model", "max_model_len", "load_format", "hf_overrides", "quantization"} <= vllm_compat.known_arguments()
    assert callable(vllm.EngineArgs.create_engine_config)
    assert callable(ModelConfig.get_hidden_size)
    assert "hf_text_config" in {field.name for field in dataclasses.fields(ModelConfig)}
    assert isinstance(VllmConfig.use_v2_model_runner, property)
    assert list(inspect.signature(get_model_architecture).parameters) == ["model_config"]
    assert {"kv_connector", "kv_role"} <= set(inspect.signature(KVTransferConfig).parameters)


def test_the_search_for_kernels_passes_over_objects_that_are_not_what_they_seem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """numba's library handle says that it has a `__dict__`, and gives a function for it."""
    dispatcher = pytest.importorskip("vllm.triton_utils.dispatcher")
    importlib.import_module("numba")
    original, wrapper = object(), object()
    holder = types.ModuleType("holder")
    holder.kernel = original  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "holder", holder)
    vllm_compat.pass_over_foreign_objects()
    dispatcher._rebind_kernels([(original, wrapper)])
    assert holder.kernel is wrapper


def test_sampled_answers_with_a_draft_have_their_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three requests with two, three and one drafted tokens; the last is greedy, and its logits are left alone."""
    from vllm.v1.sample import rejection_sampler

    # So that it is as it was for others.
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", rejection_sampler.expand_batch_to_tokens)
    vllm_compat.keep_temperatures_with_a_draft()
    asked = SimpleNamespace(
        all_greedy=False, temperature=torch.tensor([0.5, 2.0, 0.0]), top_k=torch.tensor([8, 8, 2], dtype=torch.int32), top_p=None
    )  # fmt: skip
    logits = torch.arange(48.0).view(6, 8)
    cut = rejection_sampler.apply_sampling_constraints(
        logits.clone(), torch.tensor([2, 5, 6], dtype=torch.int32), asked
    )
    wanted = logits / torch.tensor([0.5, 0.5, 2.0, 2.0, 2.0, 1.0])[:, None]
    wanted[5, :6] = float("-inf")
    assert torch.equal(cut, wanted)


def test_plain_rope_turns_every_head_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Latent attention's queries [tokens, heads, d] and its one key, flat ones, and a query alone, as vLLM's own code for any device."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    # So that it is as it was for others.
    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", RotaryEmbedding.forward_cpu)
    vllm_compat.turn_every_head()
    vllm_compat.turn_every_head()
    with set_current_vllm_config(VllmConfig()):
        rope = get_rope(
            64, max_position=256, rope_parameters={"rope_type": "default", "rope_theta": 777.0}, is_neox_style=False, dtype=torch.float32
        )  # fmt: skip
    positions, query, key = torch.arange(21), torch.randn(21, 8, 64), torch.randn(21, 1, 64)
    for one, other in ((query, key), (query.flatten(1), key.flatten(1)), (query, None)):
        wanted = rope.forward_native(positions, one.clone(), None if other is None else other.clone())
        found = rope.forward_cpu(positions, one.clone(), None if other is None else other.clone())
        torch.testing.assert_close(found, wanted)
    # A part of a wider tensor, as latent attention cuts it off.
    wide = torch.randn(21, 8, 192)
    torch.testing.assert_close(
        rope.forward_cpu(positions, wide[..., 128:], key.clone())[0],
        rope.forward_native(positions, wide[..., 128:].clone(), key.clone())[0],
    )
