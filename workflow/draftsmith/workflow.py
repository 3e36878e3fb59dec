"""What the Snakefile needs to know: the checked config, and which of its keys are a stage's params."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith import get_target, source_files
from draftsmith.config import Config, Regenerate, check_consistent, parse
from draftsmith.errors import DraftsmithError
from draftsmith.files import at_home

# Keys that change what a stage computes: whole sections, or some keys of one. A changed one re-runs that stage and what
# follows from it, nothing else; layer ids, for one, are no business of the tokens.
_ENGINE_TARGET = {"dtype", "trust_remote_code"}
# Free arguments of vLLM may quantise or override; they count as what, the rest of the section as how.
_ENGINE_ARGS = {"args"}
_EXTRACTION: dict[str, Any] = {"target": True, "engine": _ENGINE_ARGS, "extract": True}
_REGENERATION: dict[str, Any] = {
    "target": _ENGINE_TARGET,
    "engine": _ENGINE_ARGS,
    "data": True,
    "regenerate": set(Regenerate.model_fields) - Regenerate.HOW,
    "tokenize": {"max_length", "template_args"},
}
SECTIONS: dict[str, dict[str, Any]] = {
    "get_target": {"target": {"source", "revision", "trust_remote_code"}},
    "regenerate": _REGENERATION,
    # The same: by them it finds what was answered.
    "merge_answers": _REGENERATION,
    "tokenize": {"target": {"trust_remote_code"}, "data": True, "tokenize": True},
    "preflight": _EXTRACTION | {"tokenize": {"template_args"}},
    "dry_run": _EXTRACTION,
    "extract_shard": _EXTRACTION,
    # A draft that training goes on from brings its vocabulary along.
    "map_vocabulary": {"vocabulary": True, "train": {"initial_draft"}},
    # Nothing of it is computed from settings; the page bears the run's name.
    "look": {},
    "train_draft": {"train": True},
    "export_draft": {"train": True, "export": True},
    "evaluate_draft": {
        "target": _ENGINE_TARGET,
        "engine": _ENGINE_ARGS,
        "train": True,
        "export": True,
        "evaluate": True,
    },
    "report": {"report": True},
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
        origin = str(files[-1]) if files else "the config"
        checked = parse(dict(values), origin)
        check_consistent(checked, origin)
        plan = cls(checked)
        plan.check_sources()
        return plan

    def check_sources(self) -> None:
        """Fail unless every local data source and a target that is a folder are there: a run would otherwise find out only later, or in other words."""
        for place, source in enumerate(self.config.data.sources):
            if not source.path.startswith("hub:") and not at_home(source.path).exists():
                raise DraftsmithError(
                    f"{source.path}: no such file or folder; correct the config key data.sources.{place}.path"
                )
        folder = get_target.local_folder(self.config.target.source)
        if folder is not None:
            get_target.check_folder(folder, self.config.target.source)
        for key, files in {
            "data.sources": self.sources,
            "target.source": self.target_files,
            "train.initial_draft": self.initial_draft_files,
        }.items():
            for file in files:
                if "{" in file or "}" in file:
                    # There is no way to write one in a rule's input; it would end as a wildcard of the next best rule.
                    raise DraftsmithError(
                        f"{file}: Snakemake takes braces in a path for a wildcard; rename it, and correct the config key {key}"
                    )
        draft = self.config.train.source
        if draft is None:
            return
        if not (draft / "config.json").is_file():
            raise DraftsmithError(
                f"{draft}: no folder of a draft, with a config.json; correct the config key train.initial_draft"
            )
        results = Path("results") / self.config.name
        if draft.resolve().is_relative_to(results.resolve()):
            # Snakemake would only tell of a cycle, and the export would take the place of what training began with.
            raise DraftsmithError(
                f"{draft}: train.initial_draft lies in {results}, which this run writes; give this run another name, or copy the draft"
            )

    @property
    def sources(self) -> list[str]:
        """Local files of the data sources that are read, so that a changed one re-runs what is made of it."""
        files: list[str] = []
        for source in self.config.data.sources:
            path = at_home(source.path)
            if path.is_file():
                files.append(str(path))
            elif path.is_dir():
                # A link that leads nowhere is told of by the stage that would read it.
                files += [str(file) for file in source_files.within(path) if file.is_file()]
        return files

    @property
    def target_files(self) -> list[str]:
        """Files of a target that is a folder, so that a checkpoint which was trained on in place is looked at again."""
        folder = at_home(self.config.target.source)
        kinds = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.py")
        return sorted(str(file) for kind in kinds for file in folder.glob(kind)) if folder.is_dir() else []

    @property
    def initial_draft_files(self) -> list[str]:
        """Files of the draft that training goes on from, so that another one in its place is trained anew."""
        folder = self.config.train.source
        kinds = ("config.json", "*.safetensors", "*.safetensors.index.json")
        return [] if folder is None else sorted(str(file) for kind in kinds for file in folder.glob(kind))

    @property
    def gpus(self) -> int:
        """GPUs that a job of the engine asks for."""
        return 0 if self.config.engine.device == "cpu" else self.config.engine.tp

    @property
    def served(self) -> bool:
        """Whether a server writes the answers anew, so that the job which asks it needs no GPU."""
        return bool(self.config.regenerate.endpoints)

    @property
    def whole(self) -> str:
        """All of the config as JSON text."""
        return json.dumps(self.config.model_dump(mode="json"), sort_keys=True)

    def settings(self, stage: str) -> str:
        """JSON text of the keys that are the params of ``stage``."""
        values = self.config.model_dump(mode="json", include=SECTIONS[stage])
        return json.dumps(values | {"name": self.config.name}, sort_keys=True)
