"""look: the data before it is used: sample rows with their masks, histograms, domains and languages, on a page of its own.

Nothing is computed here that another stage needs; the page is there so that a mask which is off by one is seen before
hours of extraction, and the report shows the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from draftsmith.config import Config
from draftsmith.files import read_json, write_json
from draftsmith.log import log
from draftsmith.look import languages, sample, survey
from draftsmith.look.pieces import Speller


def run(
    config: Config,
    *,
    target: Path,
    rows: Path,
    tokenize_report: Path | None,
    vocabulary_report: Path | None,
    prompts: Path | None,
    report: Path | None,
    page: Path,
    seed: int = 0,
) -> None:
    """Draw ``page``, and write the figures in it as ``report``.

    What is not given (None) is not shown, and the page says so. Raises :class:`DraftsmithError` when ``target`` or
    ``rows`` cannot be read, or a given file is no JSON.
    """
    from draftsmith import report as drawing

    begun = time.monotonic()
    described = read_json(target)
    figures = look(described, rows, prompts, seed)
    others = {"tokenize": tokenize_report, "map_vocabulary": vocabulary_report}
    given = {"get_target": described, "look": figures} | {stage: read_json(at) for stage, at in others.items() if at}
    drawing.draw_data(config, given, page)
    if report is not None:
        write_json(report, figures)
    log(
        f"look: {page}, {len(figures['sample'])} of {sum(figures['rows'].values())} rows with their masks, "
        f"{time.monotonic() - begun:.1f} s"
    )


def look(target: dict[str, Any], rows: Path, prompts: Path | None, seed: int) -> dict[str, Any]:
    """The content of look.json: what ``rows`` and the evaluation's ``prompts`` hold, and a fixed sample of the rows."""
    speller = Speller.load(target)
    surveyed = survey.survey(rows, seed)
    taken = sample.take(rows, surveyed, speller)
    asked = sample.prompts(prompts, seed) if prompts else None
    return {
        "seed": seed,
        **surveyed.figures(),
        "prompts": None if asked is None else asked.by_domain,
        "languages": _languages(taken.texts, asked.texts if asked else []),
        "tokenizer": speller.problem,
        "sample": taken.rows,
    }


def _languages(trained: Iterable[str], asked: Iterable[str]) -> dict[str, Any]:
    texts = languages.without_headers({"train": list(trained), "evaluation": list(asked)})
    return {"by": languages.DETECTOR, "counts": {split: languages.count(found) for split, found in texts.items()}}
