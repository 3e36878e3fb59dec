"""The rules in their order, the file whose presence says that each is done, and what that file says of the work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Path_ = tuple[str, ...]


@dataclass(frozen=True)
class Stage:
    """``output`` and ``failed`` are below results/NAME, ``{item}`` is the shard; ``figures`` are where the output has them."""

    name: str
    output: str
    failed: str | None = None
    optional: bool = False
    """Part of a run only where something of it is to be seen."""
    beside: str | None = None
    """An optional stage of whose runs it is part."""
    unit: str | None = None
    figures: Mapping[str, Path_] | None = None

    @property
    def scattered(self) -> bool:
        """Whether there is a job a shard."""
        return "{item}" in self.output


STAGES = (
    Stage("get_target", "target.json"),
    Stage(
        "regenerate", "regenerate/shards/{item}.json", optional=True, unit="conversations",
        figures={
            "done": ("conversations",), "tokens": ("figures", "tokens"), "tokens_per_second": ("figures", "tokens_per_second"),
        },
    ),
    Stage(
        "merge_answers", "regenerate/regenerate.json", optional=True, beside="regenerate", unit="conversations",
        figures={"done": ("kept",), "tokens": ("answer_tokens",)},
    ),
    Stage("tokenize", "tokenize/tokenize.json", unit="rows", figures={"done": ("rows",), "tokens": ("tokens",)}),
    Stage("preflight", "preflight.json", failed="failed-preflight.json"),
    Stage("clean_gpus", "clean_gpus.json"),
    Stage("dry_run", "dry_run.json", failed="failed-dry_run.json"),
    Stage(
        "extract_shard", "extract/shards/{item}.json", unit="rows",
        figures={
            "batches": ("figures", "batches"), "tokens": ("figures", "tokens"), "bytes": ("figures", "bytes"),
            "tokens_per_second": ("figures", "tokens_per_second"),
        },
    ),
    Stage("merge_manifest", "extract/manifest.json", unit="rows", figures={"tokens": ("tokens",), "bytes": ("bytes",)}),
    Stage("map_vocabulary", "vocabulary/vocabulary.json", unit="tokens", figures={"done": ("size",)}),
    Stage("look", "look/look.json"),
    Stage(
        "train_draft", "train/train.json", unit="steps",
        figures={"done": ("steps",), "tokens": ("tokens",), "tokens_per_second": ("tokens_per_second",)},
    ),
    Stage("export_draft", "draft/export.json"),
    Stage(
        "evaluate_draft", "evaluate/evaluate.json", unit="prompts",
        figures={"done": ("prompts",), "tokens_per_second": ("tokens_per_second", "draft")},
    ),
    Stage("report", "report.html"),
    Stage("gate", "gate.json"),
)  # fmt: skip


def figures(stage: Stage, content: Any) -> dict[str, Any]:
    """What the content of a stage's output says of its work; what is missing there is left out."""
    found: dict[str, Any] = {}
    for name, path in (stage.figures or {}).items():
        value = content
        for part in path:
            value = value.get(part) if isinstance(value, dict) else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = value
    if "done" in found:
        found |= {"total": found["done"], "unit": stage.unit}
    return found
