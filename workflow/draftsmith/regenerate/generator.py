"""vLLM as a generator that is fed while it runs: requests in, finished answers out."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from draftsmith import engine, progress_file, vllm_compat
from draftsmith.clean_gpus import leftovers
from draftsmith.config import Config
from draftsmith.log import log
from draftsmith.processes.scratch import scratch
from draftsmith.regenerate.asking import Question, Reply


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
        # More than the engine works on at once, so that it never runs dry; few, so that an abrupt end costs little.
        self.at_once = 2 * config.engine.max_num_seqs

    def __enter__(self) -> Generator:
        begun = time.monotonic()
        self._scratch = contextlib.ExitStack()
        engine.prepare_environment(self._config, self._scratch.enter_context(scratch()))
        arguments = engine.vllm_arguments(self._config, self._target, self._max_model_len)
        arguments.setdefault("seed", self._config.regenerate.seed)
        progress_file.report(None, phase="loading the engine", always=True)
        log(f"regenerate: loading {self._target['path']} with {arguments}")
        from vllm import LLM

        vllm_compat.mend()
        self._llm = LLM(**arguments)
        leftovers.remember()
        log(f"regenerate: engine ready after {time.monotonic() - begun:.0f} s")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Left to the garbage collector, the engine's processes would outlive an error's traceback.
        with contextlib.suppress(Exception):
            self._llm.llm_engine.engine_core.shutdown()
        leftovers.forget()
        self._scratch.close()

    def ask(self, question: Question) -> None:
        """Queue a prompt's token ids."""
        from vllm import SamplingParams, TokensPrompt

        settings = self._config.regenerate
        sampling = SamplingParams(
            max_tokens=question.max_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            min_p=settings.min_p,
            repetition_penalty=settings.repetition_penalty,
            # vLLM's CPU backend fails on a request's own seed when its prompt is cut into chunks; there the engine's counts.
            seed=None if engine.on_cpu(self._config) else question.seed,
            stop_token_ids=self._stops,
            detokenize=False,
        )
        prompt = TokensPrompt(prompt_token_ids=list(question.prompt))
        self._llm.llm_engine.add_request(question.name, prompt, sampling)

    def wait(self) -> list[Reply]:
        """Let the engine work for one step; returns what it finished in it."""
        finished = [output for output in self._llm.llm_engine.step() if output.finished]
        return [_reply(output.request_id, output.outputs[0]) for output in finished]

    def described(self) -> dict[str, Any]:
        """Which engine it was."""
        return {"engine": f"vLLM {vllm_compat.version()}"}


def _reply(name: str, output: Any) -> Reply:
    ids = list(output.token_ids)
    return Reply(name, str(output.finish_reason), ids, tokens=len(ids))
