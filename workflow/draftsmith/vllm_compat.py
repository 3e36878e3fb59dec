"""What differs between vLLM releases (0.26 to 0.33) and between its two model runners; nothing else looks inside vLLM.

tests/unit/test_vllm_compat.py names each interface used here and fails when an installed release has moved it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

SUPPORTED = ("0.26", "0.33")


def version() -> str:
    """The installed release."""
    from vllm import __version__

    return str(__version__)


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
