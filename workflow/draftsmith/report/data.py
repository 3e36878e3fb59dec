"""Gathers what the stages wrote. A file that is missing or broken is no error here: the page says so in its place."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.config import Config
from draftsmith.errors import DraftsmithError
from draftsmith.files import read_json
from draftsmith.report import benchmarks
from draftsmith.report.benchmarks import Benchmarks
from draftsmith.report.values import mapping

REPORTS = {
    "get_target": "target.json",
    "merge_answers": "regenerate/regenerate.json",
    "tokenize": "tokenize/tokenize.json",
    "preflight": "preflight.json",
    "clean_gpus": "clean_gpus.json",
    "dry_run": "dry_run.json",
    "merge_manifest": "extract/manifest.json",
    "map_vocabulary": "vocabulary/vocabulary.json",
    "look": "look/look.json",
    "train_draft": "train/train.json",
    "export_draft": "draft/export.json",
    "evaluate_draft": "evaluate/evaluate.json",
}
"""The JSON file that each stage leaves, relative to results/NAME."""

# What is whose where stages share a folder.
_SHARED = {
    "regenerate": "regenerate/shards/*.json",
    "merge_answers": "regenerate/*",
    "merge_manifest": REPORTS["merge_manifest"],
}

# Where these stages leave their figures when they fail, since Snakemake deletes the output of a failed job.
_FAILED = {
    "preflight": "failed-preflight.json",
    "dry_run": "failed-dry_run.json",
}


@dataclass
class Gathered:
    """The contents of the stages' files; ``absent`` says why a stage is not among the ``reports``."""

    config: Config
    results: Path
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    shards: dict[str, dict[str, Any]] = field(default_factory=dict)
    benchmarks: Benchmarks = field(default_factory=lambda: Benchmarks({}))

    def of(self, stage: str) -> dict[str, Any]:
        """What the stage wrote; empty if nothing."""
        return self.reports.get(stage, {})

    def on_disk(self, stage: str) -> int | None:
        """Bytes of the stage's results; for extract_shard those of the store's batch files."""
        if stage == "extract_shard":
            value = self.of("merge_manifest").get("bytes")
            return value if isinstance(value, int) else None
        name = REPORTS.get(stage)
        if name is not None and not (self.results / name).exists():
            return None
        # Its only output is one file, or it has a folder of its own.
        own = name if name is None or "/" not in name else f"{name.split('/')[0]}/**/*"
        pattern = _SHARED.get(stage, own)
        files = [file for file in self.results.glob(pattern) if file.is_file()] if pattern else []
        return sum(file.stat().st_size for file in files) if files else None


def gather(config: Config, results: Path, measured: Path) -> Gathered:
    """Read every stage's file below ``results`` and the benchmark files below ``measured``.

    Raises :class:`DraftsmithError` when there is not a single one.
    """
    gathered = Gathered(config, results)
    for stage, name in REPORTS.items():
        _read(gathered, stage, results / name)
    for stage, name in _FAILED.items():
        if stage in gathered.absent and (results / name).exists():
            _read(gathered, stage, results / name)
    if not gathered.reports:
        raise DraftsmithError(
            f"{results}: holds no results of any stage; run the workflow first, or give the folder results/NAME"
        )
    gathered.shards = _shards(results / "extract" / "shards")
    answered = gathered.of("merge_answers").get("shards")
    counts = {"extract_shard": len(gathered.shards), "regenerate": answered if isinstance(answered, int) else 0}
    gathered.benchmarks = benchmarks.read(measured, counts)
    return gathered


def _read(gathered: Gathered, stage: str, path: Path) -> None:
    try:
        content = read_json(path)
    except DraftsmithError as error:
        gathered.absent[stage] = str(error)
        return
    if isinstance(content, dict):
        gathered.reports[stage] = content
        gathered.absent.pop(stage, None)
    else:
        gathered.absent[stage] = f"{path}: holds no JSON object; delete it and run its stage again"


def _shards(folder: Path) -> dict[str, dict[str, Any]]:
    """Manifests of the shards by scatteritem, without their rows.

    Manifests of another number of shards may lie beside them, from before it was changed: the complete set written last
    counts.
    """
    sets: dict[int, dict[str, Path]] = {}
    for path in folder.glob("*.json"):
        of = benchmarks.shard_count(path.stem)
        if of is not None:
            sets.setdefault(of, {})[path.stem] = path
    complete = [found for of, found in sets.items() if len(found) == of]
    if not complete:
        return {}
    newest = max(complete, key=lambda found: max(path.stat().st_mtime_ns for path in found.values()))
    shards = {}
    for item in sorted(newest, key=lambda name: int(name.split("-")[0])):
        try:
            content = read_json(newest[item])
        except DraftsmithError:
            content = None
        shards[item] = (
            {"figures": content.get("figures"), "rows": len(mapping(content, "rows"))}
            if isinstance(content, dict)
            else {}
        )
    return shards
