"""What the Snakefile needs to know: the checked config, and which of its sections are a stage's params."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.config import Config, parse
from draftsmith.errors import DraftsmithError

# Sections that change what a stage computes. A changed one re-runs that stage and what follows from it, nothing else.
SECTIONS: dict[str, tuple[str, ...]] = {
    "get_target": ("target",),
    "regenerate": ("target", "data", "regenerate", "tokenize"),
    "tokenize": ("data", "tokenize"),
    "preflight": ("target", "preflight", "tokenize", "extract"),
    "clean_gpus": ("clean",),
    "extract_shard": ("target", "extract", "clean"),
    "map_vocabulary": ("vocabulary",),
    "train_draft": ("train", "clean"),
    "export_draft": ("train", "export"),
    "evaluate_draft": ("target", "train", "export", "evaluate", "clean"),
    "report": ("report",),
}


@dataclass(frozen=True)
class Plan:
    """A checked config as the rules use it."""

    config: Config

    @classmethod
    def of(cls, values: Mapping[str, Any], files: Sequence[str]) -> Plan:
        """Check what Snakemake read from its config files and command line.

        Raises :class:`DraftsmithError` with one sentence a fault, which names the last config file given and the key.
        """
        checked = parse(dict(values), str(files[-1]) if files else "the config")
        plan = cls(checked)
        plan.check_sources()
        return plan

    def check_sources(self) -> None:
        """Fail unless every local data source is there: a run would otherwise find out only later, or in other words."""
        for place, source in enumerate(self.config.data.sources):
            if not source.path.startswith("hub:") and not Path(source.path).exists():
                raise DraftsmithError(f"{source.path}: no such file or folder; correct the config key data.sources.{place}.path")

    @property
    def sources(self) -> list[str]:
        """Local files of the data sources, so that a changed one re-runs what is made of it."""
        files: list[str] = []
        for source in self.config.data.sources:
            path = Path(source.path)
            if path.is_file():
                files.append(str(path))
            elif path.is_dir():
                files += sorted(str(file) for file in path.rglob("*") if file.is_file())
        return files

    @property
    def gpus(self) -> int:
        """GPUs that a job of the engine asks for."""
        return 0 if self.config.engine.device == "cpu" else self.config.engine.tp

    @property
    def engine(self) -> str:
        """The engine's section as JSON text."""
        return json.dumps(self.config.engine.model_dump(mode="json"), sort_keys=True)

    def settings(self, stage: str) -> str:
        """JSON text of the sections that are the params of ``stage``."""
        values = self.config.model_dump(mode="json", include=set(SECTIONS[stage]))
        return json.dumps(values | {"name": self.config.name}, sort_keys=True)
