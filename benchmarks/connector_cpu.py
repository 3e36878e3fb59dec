"""vLLM's ExampleHiddenStatesConnector on a CPU, for the comparison: it has no pinned memory, streams or events there."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class _Done:
    def synchronize(self) -> None:
        """A copy on the CPU is over when it returns."""

    def query(self) -> bool:
        """Likewise."""
        return True


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):
    """The same work in the same threads; only the copy to the host is left out, as the states are there already."""

    def _submit_async_write(self, pending: Any) -> None:
        import torch

        if not self._is_tp_rank_zero:
            return
        offsets = torch.arange(0, self._block_size)
        slots = (offsets.view(1, -1) + torch.tensor(pending.block_ids).view(-1, 1) * self._block_size).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, pending.token_ids.shape[0]).contiguous()
        lock = self._lock_fds.pop(pending.req_id, None)
        self._req_copy_events[pending.req_id] = _Done()
        future = self._executor.submit(
            self._write_tensors,
            {"hidden_states": states, "token_ids": pending.token_ids.clone()},
            _Done(),
            pending.filename,
            lock,
        )
        self._req_futures[pending.req_id] = future
        future.add_done_callback(lambda done: self._on_write_done(pending.req_id, done))
