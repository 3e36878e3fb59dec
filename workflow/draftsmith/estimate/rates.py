"""How fast each stage is: given by hand, or as an earlier run has measured it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from draftsmith.errors import DraftsmithError
from draftsmith.status.files import benchmark_seconds, json_object

_MOST_BYTES = 512 << 20
# Stages without a rate of their own take what they took.
_CONSTANT = (
    "get_target",
    "preflight",
    "clean_gpus",
    "dry_run",
    "merge_answers",
    "merge_manifest",
    "map_vocabulary",
    "export_draft",
)
# A start of Python with transformers in it, which a tokenisation of few rows mostly is.
_TOKENIZE_START = 12.0
GIVEN = ("extract", "train", "tokenize", "regenerate", "evaluate", "evaluate_draft", "load")
"""Names that ``--rate`` knows; the unit of each, which the formulas of :mod:`draftsmith.estimate.times` give, is in the help of the option."""


@dataclass
class Rates:
    """``rate`` in tokens a second, ``fixed`` in seconds a job, ``source`` in words, each by stage; ``facts`` for other figures."""

    rate: dict[str, float] = field(default_factory=dict)
    fixed: dict[str, float] = field(default_factory=dict)
    source: dict[str, str] = field(default_factory=dict)
    facts: dict[str, float] = field(default_factory=dict)


def measured(results: Path) -> Rates:
    """What the run in ``results`` (results/NAME) has measured; empty where it has not."""
    rates = Rates()
    benchmarks = results.absolute().parent.parent / "benchmarks" / "rules" / results.name
    for stage in _CONSTANT:
        if (seconds := benchmark_seconds(benchmarks / f"{stage}.tsv")) is not None:
            rates.fixed[stage], rates.source[stage] = seconds, f"as in {results}"
    _sharded(rates, "regenerate", results / "regenerate" / "shards", results, benchmarks)
    _sharded(rates, "extract_shard", results / "extract" / "shards", results, benchmarks)
    _training(rates, results, benchmarks)
    if (report := _json(results / "tokenize" / "tokenize.json")) and (
        seconds := benchmark_seconds(benchmarks / "tokenize.tsv")
    ):
        start = min(_TOKENIZE_START, 0.9 * seconds)
        _put(rates, "tokenize", report.get("tokens", 0) / max(seconds - start, 0.1), start, results)
    _evaluation(rates, results, benchmarks)
    return rates


def _put(rates: Rates, stage: str, rate: float, fixed: float | None, results: Path) -> None:
    if rate > 0:
        rates.rate[stage], rates.source[stage] = rate, f"measured in {results}"
        if fixed is not None:
            rates.fixed[stage] = fixed


def _sharded(rates: Rates, stage: str, folder: Path, results: Path, benchmarks: Path) -> None:
    """The rate of one shard of ``stage`` and what each costs besides, by the shards' files in ``folder``."""
    seconds = tokens = 0.0
    fixed = []
    for path in folder.glob("*.json"):
        figures = (_json(path) or {}).get("figures") or {}
        # What was there already took no time.
        if figures.get("tokens") and figures.get("seconds"):
            seconds, tokens = seconds + figures["seconds"], tokens + figures["tokens"]
            wall = benchmark_seconds(benchmarks / stage / f"{path.stem}.tsv")
            fixed.append(max(wall - figures["seconds"] if wall else 0.0, figures.get("load_seconds") or 0.0))
    if fixed:
        _put(rates, stage, tokens / seconds, sum(fixed) / len(fixed), results)


def _training(rates: Rates, results: Path, benchmarks: Path) -> None:
    report = _json(results / "train" / "train.json")
    if not report or not report.get("tokens_per_second"):
        return
    wall = benchmark_seconds(benchmarks / "train_draft.tsv")
    fixed = None
    if wall is not None and not report.get("resumed_from") and report.get("seconds"):
        # Loads, validations and checkpoints.
        fixed = max(0.0, wall - report["seconds"])
    _put(rates, "train_draft", report["tokens_per_second"] / (report.get("world_size") or 1), fixed, results)


def _evaluation(rates: Rates, results: Path, benchmarks: Path) -> None:
    report = _json(results / "evaluate" / "evaluate.json")
    speeds = (report or {}).get("tokens_per_second") or {}
    if not report or not speeds.get("plain") or not speeds.get("draft") or not report.get("prompts"):
        return
    # The first token of an answer is nobody's draft.
    answer = (report["drafts"] + report["accepted"]) / report["prompts"] + 1
    rates.facts["answer_tokens"] = min(answer, report.get("max_tokens") or answer)
    rates.rate["evaluate"], rates.rate["evaluate_draft"] = speeds["plain"], speeds["draft"]
    if report.get("requests_at_once"):
        rates.facts["requests_at_once"] = report["requests_at_once"]
    rates.source["evaluate_draft"] = f"measured in {results}"
    if (wall := benchmark_seconds(benchmarks / "evaluate_draft.tsv")) is not None:
        servings, seconds = _served(report)
        rates.facts["serving_start"] = max(0.0, wall - seconds) / servings


def _served(report: Mapping[str, Any]) -> tuple[int, float]:
    """How many servings an evaluation started, and the seconds in which they answered."""
    measures = report.get("sweep") or [report]
    seconds = 0.0
    lengths: set[int | None] = set()
    temperatures: set[float | None] = set()
    for measure in measures:
        tokens = measure["drafts"] + measure["accepted"] + measure["prompts"]
        seconds += tokens / measure["tokens_per_second"]["draft"]
        # Answers without a draft are those of all draft lengths.
        if measure.get("temperature") not in temperatures:
            seconds += tokens / measure["tokens_per_second"]["plain"]
        lengths.add(measure.get("k"))
        temperatures.add(measure.get("temperature"))
    for load in report.get("concurrency") or []:
        seconds += sum(window["seconds"] for windows in load["windows"].values() for window in windows)
    return 1 + len(lengths) + bool(report.get("untrained")), seconds


def _json(path: Path) -> dict[str, Any] | None:
    return json_object(path, _MOST_BYTES)


def given(rates: Rates, words: Sequence[str], file: Path | None) -> Rates:
    """``rates`` with those of ``--rate NAME=NUMBER`` and of a YAML file of the same names laid over them.

    Raises :class:`DraftsmithError` for a name that is none, or a number that is none.
    """
    told: dict[str, Any] = {}
    if file is not None:
        try:
            told = yaml.safe_load(file.read_text()) or {}
        except (OSError, yaml.YAMLError) as error:
            raise DraftsmithError(
                f"{file}: cannot be read as YAML ({type(error).__name__}); write lines as `extract: 42000`"
            ) from None
        if not isinstance(told, dict):
            raise DraftsmithError(f"{file}: must hold lines as `extract: 42000`")
    told = {str(name): (value, str(file)) for name, value in told.items()}
    for word in words:
        name, _, value = word.partition("=")
        told[name.strip()] = (value, "--rate")
    for name, (value, origin) in told.items():
        if name not in GIVEN:
            raise DraftsmithError(f"{origin}: {name} is no stage with a rate; known are {', '.join(GIVEN)}")
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = 0.0
        if not 0 < number < float("inf"):
            raise DraftsmithError(f"{origin}: {name}={value}: a positive number is needed, as in {name}=1000")
        _take(rates, name, number, origin)
    return rates


def _take(rates: Rates, name: str, number: float, origin: str) -> None:
    if name == "load":
        for stage in ("extract_shard", "regenerate"):
            rates.fixed[stage] = number
        rates.facts["load"] = number
        return
    stage = {"extract": "extract_shard", "train": "train_draft"}.get(name, name)
    rates.rate[stage] = number
    rates.source["evaluate_draft" if name == "evaluate" else stage] = f"given by {origin}"
