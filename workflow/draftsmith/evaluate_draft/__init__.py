"""evaluate_draft: serve the target with and without the draft, on prompts kept away from training."""

from __future__ import annotations

import importlib.metadata
import json
from collections import defaultdict
from itertools import groupby, islice
from pathlib import Path
from typing import Any, TypeVar

from draftsmith import export_draft
from draftsmith.config import Config
from draftsmith.errors import DraftsmithError
from draftsmith.evaluate_draft import figures
from draftsmith.evaluate_draft.causes import likely_causes
from draftsmith.evaluate_draft.counts import Counts
from draftsmith.evaluate_draft.faults import Served
from draftsmith.evaluate_draft.servings import Measure, Servings
from draftsmith.files import read_object, reason, write_json, writing
from draftsmith.log import log

_VERSIONS = ("draftsmith", "snakemake", "torch", "transformers")
# Keys of a prompt, as tokenize writes them.
_PROMPT: dict[str, type] = {"prompt_id": str, "domain": str, "prompt_token_ids": list}
_T = TypeVar("_T", int, float)


def run(
    config: Config, *, target: Path, draft: Path, vocabulary: Path, prompts: Path, workdir: Path, report: Path
) -> None:
    """Measure the exported draft in the folder ``draft`` and write ``report``.

    Each draft length is a serving in a process of its own; what it measures is kept in ``workdir``, for this very draft,
    prompts, settings and vLLM. An acceptance length below ``evaluate.min_acceptance_length`` is a figure like any other here,
    with its likely causes; no further draft length is served then. The stage ``gate`` fails for it, when the page is drawn.
    """
    described, questions, settings = read_object(target, "path", "fingerprint"), read_prompts(prompts), config.evaluate
    with writing(workdir, "evaluate_draft"):
        workdir.mkdir(parents=True, exist_ok=True)
    servings = Servings.of(config, described, draft, prompts, workdir)
    answers = [Measure(each) for each in _each_once([settings.temperature, *settings.temperatures])]
    loads = [Measure(settings.temperature, number) for number in _each_once(settings.concurrency)]
    plain = servings.take("plain", questions, [*answers, *loads])
    drafted = {settings.k: servings.take(f"draft-{settings.k}", questions, [*answers, *loads], draft, settings.k)}
    main = figures.served(plain[answers[0]], drafted[settings.k][answers[0]], questions, settings.k)
    length, minimum = main["acceptance_length"], settings.min_acceptance_length
    untrained = _untrained(servings, questions, target, draft, vocabulary) if settings.untrained else None
    passed = length >= minimum
    for k in _each_once(settings.ks):
        if passed and k != settings.k:
            drafted[k] = servings.take(f"draft-{k}", questions, answers, draft, k)

    counts = Counts.of(drafted[settings.k][answers[0]]["domains"].values())
    causes = likely_causes(Served(config, described, draft, questions, report.parent.parent), counts, minimum)
    sweep = [
        figures.served(plain[measure], drafted[k][measure], questions, k)
        for k in sorted(drafted)
        for measure in answers
    ]
    result = main | {
        "max_tokens": settings.max_tokens,
        "requests_at_once": max(c["prompts"] for c in plain[answers[0]]["domains"].values()),
        "untrained": untrained,
        # One line alone would only say again what is above.
        "sweep": sweep if len(sweep) > 1 else [],
        "concurrency": [figures.at_once(load.in_flight or 0, plain[load], drafted[settings.k][load]) for load in loads],
        "gate": {"minimum": minimum, "passed": passed, "causes": causes},
        "versions": {name: importlib.metadata.version(name) for name in _VERSIONS}
        | {"vllm": plain[answers[0]]["vllm"]},
    }
    for line in figures.in_words(result):
        log(f"evaluate: {line}")
    write_json(report, result)


def _untrained(
    servings: Servings, questions: list[dict[str, Any]], target: Path, draft: Path, vocabulary: Path
) -> dict[str, Any]:
    """Figures of the draft that training began with."""
    settings, folder = servings.config.evaluate, servings.folder / "untrained-draft"
    ids = "eagle_aux_hidden_state_layer_ids"
    layers = read_object(draft / "config.json", ids)[ids]
    export_draft.untrained(servings.config, target=target, layers=layers, vocabulary=vocabulary, folder=folder)
    measure, few = Measure(settings.temperature), _few(questions)
    found = servings.take(f"untrained-{settings.k}", few, [measure], folder, settings.k)[measure]
    return {"prompts": len(few), **Counts.of(found["domains"].values()).figures()}


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """The lines of prompts.jsonl in the order in which they are served; the answers that are kept lie in the same.

    Raises :class:`DraftsmithError` naming the first line that is cut off, or lacks a key.
    """
    mend = "delete the file and run tokenize again"
    try:
        # Not splitlines, which breaks at separators that JSON may hold.
        lines = [line for line in path.read_text().split("\n") if line]
    except (OSError, UnicodeDecodeError) as error:
        raise DraftsmithError(f"{path}: cannot be read ({reason(error)}); run tokenize again") from None
    questions = []
    for number, line in enumerate(lines, 1):
        try:
            question = json.loads(line)
        except ValueError:
            raise DraftsmithError(f"{path}: line {number} is no JSON (is it cut off?); {mend}") from None
        for key, kind in _PROMPT.items():
            value = question.get(key) if isinstance(question, dict) else None
            if not isinstance(value, kind) or value == []:
                raise DraftsmithError(f"{path}: line {number} has no {key}; {mend}")
        questions.append(question)
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


def _each_once(values: list[_T]) -> list[_T]:
    return list(dict.fromkeys(values))
