"""One serving, in a process of its own: ``python -m draftsmith.evaluate_draft.serve JOB RESULT``."""

from __future__ import annotations

import dataclasses
import sys
import time
from itertools import groupby
from pathlib import Path
from typing import Any

from draftsmith import engine, progress_file, vllm_compat
from draftsmith.clean_gpus import leftovers
from draftsmith.config import Config
from draftsmith.evaluate_draft.counts import Counts
from draftsmith.files import read_json, write_json
from draftsmith.log import log
from draftsmith.processes import driver_watch
from draftsmith.processes.scratch import scratch


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """Answer the job's prompts, domain by domain.

    Returns the outputs (token ids, one list a prompt), tokens/s over the generation alone, and each domain's counts.
    """
    config = Config.model_validate(job["config"])
    with scratch() as sockets:
        return _serve(job, config, sockets)


def _serve(job: dict[str, Any], config: Config, sockets: Path) -> dict[str, Any]:
    engine.prepare_environment(config, sockets)
    from vllm import LLM, SamplingParams, TokensPrompt

    vllm_compat.pass_over_foreign_objects()
    progress_file.report(0, len(job["prompts"]), "prompts", phase=f"{job['name']}: loading the engine", always=True)
    begun = time.perf_counter()
    llm = LLM(**job["arguments"] | {"disable_log_stats": False})
    loaded = time.perf_counter() - begun
    leftovers.remember()
    settings = config.evaluate
    sampling = SamplingParams(
        temperature=settings.temperature, max_tokens=settings.max_tokens, seed=0, detokenize=False
    )
    # The first steps of an engine are slower than the others.
    llm.generate(
        [TokensPrompt(prompt_token_ids=job["prompts"][0]["token_ids"])], SamplingParams(max_tokens=4), use_tqdm=False
    )
    domains: dict[str, Any] = {}
    outputs: list[list[int]] = []
    seconds = 0.0
    for domain, group in groupby(job["prompts"], key=lambda prompt: prompt["domain"]):
        prompts = [TokensPrompt(prompt_token_ids=prompt["token_ids"]) for prompt in group]
        before, start = Counts.read(llm.get_metrics()), time.perf_counter()
        answers = [list(answer.outputs[0].token_ids) for answer in llm.generate(prompts, sampling, use_tqdm=False)]
        seconds += time.perf_counter() - start
        domains[domain] = {"prompts": len(prompts), **dataclasses.asdict(Counts.read(llm.get_metrics()).since(before))}
        outputs += answers
        progress_file.report(
            len(outputs), len(job["prompts"]), "prompts", phase=job["name"], tokens_per_second=sum(map(len, outputs)) / seconds, always=True
        )  # fmt: skip
        log(
            f"evaluate: {job['name']}: {domain}: {sum(map(len, answers))} tokens, acceptance length {Counts.of([domains[domain]]).acceptance_length:.2f}"
        )
    # Now and not by the garbage collector: the next serving needs the memory.
    llm.llm_engine.engine_core.shutdown()
    leftovers.forget()
    tokens = sum(map(len, outputs))
    return {
        "outputs": outputs,
        "domains": domains,
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "load_seconds": round(loaded, 2),
        "tokens_per_second": round(tokens / seconds, 2),
        "vllm": vllm_compat.version(),
    }


if __name__ == "__main__":
    # The stage that waits for the result may be killed; nobody would end this serving then.
    driver_watch.follow_parent()
    write_json(Path(sys.argv[2]), serve(read_json(Path(sys.argv[1]))))
