"""Tensor parallelism over two processes without vLLM's own executor: one of them is the caller's, the other is kept.

vLLM starts its processes anew for every model, and each imports vllm for a quarter of a minute. Here the second rank is a
process that stays and runs one model after the other, told what to do through a pipe. Everything else is vLLM's and the
package's own: ``engine.args: {distributed_executor_backend: pair.Pair}`` in the config of any stage.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from vllm.distributed import destroy_distributed_environment, destroy_model_parallel
from vllm.utils.network_utils import get_open_port
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.serial_utils import run_method
from vllm.v1.worker.worker_base import WorkerWrapperBase

from draftsmith import vllm_compat

vllm_compat.mend()


class OtherRank:
    """The process of rank 1, from the caller's side."""

    def __init__(self) -> None:
        self.pipe, far = multiprocessing.Pipe()
        # Through the environment, as this module's own folder may be on sys.path alone.
        variables = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", "pair", str(far.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[far.fileno()], env=variables)
        far.close()

    def send(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Begin a call of the worker's ``method``."""
        self.pipe.send((method, args, kwargs))

    def answer(self) -> Any:
        """Wait for the result of the call; raises what it raised."""
        result = self.pipe.recv()
        if isinstance(result, BaseException):
            raise result
        return result

    def end(self) -> None:
        """End the process, whatever it is doing."""
        self.process.kill()
        self.process.wait()


other: OtherRank | None = None


def start() -> OtherRank:
    """Start rank 1; it imports vllm while the caller goes on."""
    global other
    other = OtherRank()
    return other


class Pair(UniProcExecutor):
    """Rank 0 in this process, rank 1 in :data:`other`."""

    def _init_executor(self) -> None:
        assert other is not None, "call pair.start() first"
        # An engine of this process may have left a world of one rank.
        _leave()
        # Two names for one place: ranks that do not agree on a name talk through sockets, not through shared memory, where
        # each would turn in circles on a core that the other one needs.
        method = f"tcp://127.0.0.1:{get_open_port()}"
        other.send("begin", self.vllm_config, f"{method}?shown=1", _variables())
        self.driver_worker = _worker(0, self.vllm_config, f"{method}?shown=0")
        other.answer()
        for step in ("init_device", "load_model"):
            self.collective_rpc(step)

    def collective_rpc(  # type: ignore[override]
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        single_value: bool = False,
    ) -> Any:
        """Call ``method`` in both ranks, at the same time; answers in the order of ranks."""
        assert other is not None
        other.send("call", method, args, kwargs or {}, single_value)
        mine = super().collective_rpc(method, timeout, args, kwargs, non_block, single_value=True)
        theirs = other.answer()
        return mine if single_value else [mine, theirs]

    def shutdown(self) -> None:
        """End both workers, not the process of rank 1."""
        if self.driver_worker is not None and other is not None:
            other.send("end")
            super().shutdown()
            self.driver_worker = None
            _leave()
            other.answer()


def _worker(rank: int, config: Any, method: str) -> WorkerWrapperBase:
    worker = WorkerWrapperBase(rpc_rank=rank)
    mine = {
        "vllm_config": config, "local_rank": rank, "rank": rank, "distributed_init_method": method,
        "is_driver_worker": rank == 0, "shared_worker_lock": multiprocessing.Lock(),
    }  # fmt: skip
    worker.init_worker(all_kwargs=[mine] * 2)
    return worker


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(("VLLM_", "DRAFTSMITH_"))}


def _leave() -> None:
    destroy_model_parallel()
    destroy_distributed_environment()


class _Rank1:
    """What rank 1 does on the caller's word."""

    worker: WorkerWrapperBase

    def begin(self, config: Any, method: str, variables: dict[str, str]) -> None:
        os.environ.update(variables)
        self.worker = _worker(1, config, method)

    def call(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any], single_value: bool) -> Any:
        result = run_method(self.worker, method, args, kwargs)
        return None if single_value else result

    def end(self) -> None:
        self.worker.shutdown()
        del self.worker
        _leave()


def _serve(pipe: Connection) -> None:
    rank = _Rank1()
    while True:
        try:
            what, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(getattr(rank, what)(*args, **kwargs))
        except Exception as error:
            pipe.send(RuntimeError(f"rank 1: {error!r}"))
            raise


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
