"""One serving, in a process of its own: ``python -m draftsmith.evaluate_draft.serve JOB``.

An engine is started once and everything that the job asks of it is measured; each measure's result is a file of its own,
written whole as soon as it is there, so that a serving that was killed goes on behind the last one.
"""

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
from draftsmith.evaluate_draft import in_flight
from draftsmith.evaluate_draft.counts import Counts
from draftsmith.files import read_json, write_json
from draftsmith.log import log
from draftsmith.processes import driver_watch
from draftsmith.processes.scratch import scratch


def serve(job: dict[str, Any], folder: Path) -> None:
    """Take the job's measures one after the other; each goes to ``folder``/NAME.json."""
    config = Config.model_validate(job["config"])
    with scratch() as sockets:
        engine.prepare_environment(config, sockets)
        from vllm import LLM, SamplingParams

        vllm_compat.mend()
        progress_file.report(0, len(job["prompts"]), "prompts", phase=f"{job['name']}: loading the engine", always=True)
        begun = time.perf_counter()
        llm = LLM(**job["arguments"] | {"disable_log_stats": False})
        started = {
            "load_seconds": round(time.perf_counter() - begun, 2),
            "vllm": vllm_compat.version(),
            "job": job["job"],
        }
        leftovers.remember()
        # The first steps of an engine are slower than the others.
        llm.generate([_prompt(job["prompts"][0])], SamplingParams(max_tokens=4), use_tqdm=False)
        for measure in job["measures"]:
            sampling = SamplingParams(
                temperature=measure["temperature"],
                max_tokens=config.evaluate.max_tokens,
                # vLLM's CPU backend fails on a request's own seed when its prompt is cut into chunks; there the engine's counts.
                seed=None if engine.on_cpu(config) else 0,
                detokenize=False,
            )
            # No measure is to find the prompts of an earlier one read already.
            llm.reset_prefix_cache()
            taken = _answers if measure["in_flight"] is None else _in_flight
            write_json(folder / f"{measure['name']}.json", measure | started | taken(llm, job, measure, sampling))
        # Now and not by the garbage collector: the next serving needs the memory.
        llm.llm_engine.engine_core.shutdown()
        leftovers.forget()


def _prompt(prompt: dict[str, Any]) -> Any:
    from vllm import TokensPrompt

    return TokensPrompt(prompt_token_ids=prompt["token_ids"])


def _answers(llm: Any, job: dict[str, Any], measure: dict[str, Any], sampling: Any) -> dict[str, Any]:
    """The answers (token ids, one list a prompt), tokens/s over the generation alone, and each domain's counts."""
    domains: dict[str, Any] = {}
    outputs: list[list[int]] = []
    seconds = 0.0
    phase = f"{job['name']}, temperature {measure['temperature']:g}"
    for domain, group in groupby(job["prompts"], key=lambda prompt: prompt["domain"]):
        prompts = [_prompt(prompt) for prompt in group]
        settings = [in_flight.seeded(sampling, len(outputs) + place) for place in range(len(prompts))]
        before, start = Counts.read(llm.get_metrics()), time.perf_counter()
        answers = [list(answer.outputs[0].token_ids) for answer in llm.generate(prompts, settings, use_tqdm=False)]
        seconds += time.perf_counter() - start
        domains[domain] = {"prompts": len(prompts), **dataclasses.asdict(Counts.read(llm.get_metrics()).since(before))}
        outputs += answers
        progress_file.report(
            len(outputs), len(job["prompts"]), "prompts", phase=phase, tokens_per_second=sum(map(len, outputs)) / seconds, always=True
        )  # fmt: skip
        log(
            f"evaluate: {phase}: {domain}: {sum(map(len, answers))} tokens, acceptance length {Counts.of([domains[domain]]).acceptance_length:.2f}"
        )
    tokens = sum(map(len, outputs))
    return {
        "outputs": outputs,
        "domains": domains,
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 2),
    }


def _in_flight(llm: Any, job: dict[str, Any], measure: dict[str, Any], sampling: Any) -> dict[str, Any]:
    """Tokens/s at the measure's number of requests in flight, over all windows."""
    phase = f"{job['name']}, {measure['in_flight']} in flight"
    progress_file.report(None, phase=phase, always=True)
    prompts = [_prompt(prompt) for prompt in in_flight.mixed(job["prompts"])]
    windows = in_flight.measure(llm.llm_engine, prompts, sampling, measure["in_flight"])
    tokens, seconds = (sum(window[key] for window in windows) for key in ("tokens", "seconds"))
    log(f"evaluate: {phase}: {tokens} tokens, {tokens / seconds:.1f} tokens/s")
    return {"windows": windows, "tokens_per_second": round(tokens / seconds, 2)}


if __name__ == "__main__":
    # The stage that waits for the results may be killed; nobody would end this serving then.
    driver_watch.follow_parent()
    path = Path(sys.argv[1])
    serve(read_json(path), path.parent)
