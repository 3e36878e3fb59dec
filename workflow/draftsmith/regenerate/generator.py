"""vLLM as a generator that is fed while it runs: requests in, finished answers out."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from draftsmith import engine, vllm_compat
from draftsmith.config import Config
from draftsmith.log import log


class Generated(NamedTuple):
    """A finished request: its token ids, the end-of-turn token among them, and vLLM's reason ('stop', 'length', …)."""

    request: str
    token_ids: list[int]
    finish_reason: str


class Generator:
    """The target in vLLM, loaded on entering the ``with`` block and ended on leaving it.

    Args:
        config: settings of the engine and of the sampling.
        target: the content of target.json.
        max_model_len: longest prompt and answer together, in tokens.
        stops: ids that end an answer besides those of the generation config.
    """

    def __init__(self, config: Config, target: dict[str, Any], max_model_len: int, stops: Sequence[int]) -> None:
        self._config, self._target, self._max_model_len, self._stops = config, target, max_model_len, list(stops)
        self._llm: Any = None

    def __enter__(self) -> Generator:
        begun = time.monotonic()
        self._scratch = tempfile.TemporaryDirectory(prefix="ds-", ignore_cleanup_errors=True)
        engine.prepare_environment(self._config, Path(self._scratch.name))
        arguments = engine.vllm_arguments(self._config, self._target, self._max_model_len)
        arguments.setdefault("seed", self._config.regenerate.seed)
        log(f"regenerate: loading {self._target['path']} with {arguments}")
        from vllm import LLM

        vllm_compat.pass_over_foreign_objects()
        self._llm = LLM(**arguments)
        log(f"regenerate: engine ready after {time.monotonic() - begun:.0f} s")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Left to the garbage collector, the engine's processes would outlive an error's traceback.
        with contextlib.suppress(Exception):
            self._llm.llm_engine.engine_core.shutdown()
        self._scratch.cleanup()

    def add(self, request: str, prompt: Sequence[int], max_tokens: int, seed: int) -> None:
        """Queue a prompt's token ids."""
        from vllm import SamplingParams, TokensPrompt

        settings = self._config.regenerate
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            repetition_penalty=settings.repetition_penalty,
            # vLLM's CPU backend fails on a request's own seed when its prompt is cut into chunks; there the engine's counts.
            seed=seed if settings.temperature > 0 and not engine.on_cpu(self._config) else None,
            stop_token_ids=self._stops,
            detokenize=False,
        )
        self._llm.llm_engine.add_request(request, TokensPrompt(prompt_token_ids=list(prompt)), sampling)

    def step(self) -> list[Generated]:
        """Let the engine work for one step; returns what it finished in it."""
        return [
            Generated(output.request_id, list(output.outputs[0].token_ids), str(output.outputs[0].finish_reason))
            for output in self._llm.llm_engine.step()
            if output.finished
        ]
