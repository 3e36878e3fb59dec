"""``python -m draftsmith.headline results/NAME``: what a run came to, in a few lines for the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from draftsmith.errors import DraftsmithError
from draftsmith.files import read_json
from draftsmith.log import log


def headline(results: Path, evaluation: dict[str, Any]) -> str:
    """The acceptance length of evaluate.json, and where the draft and the report lie."""
    untrained = evaluation.get("untrained")
    start = f"; untrained draft {untrained['acceptance_length']:.2f}" if untrained else ""
    return "\n".join(
        [
            f"draft:  {results / 'draft'}",
            f"report: {results / 'report.html'}",
            f"acceptance length: {evaluation['acceptance_length']:.2f} "
            f"(k = {evaluation['k']}, {evaluation['prompts']} held-out prompts{start})",
        ]
    )


def main() -> None:
    """The command line."""
    try:
        results = Path(sys.argv[1])
        print(headline(results, read_json(results / "evaluate/evaluate.json")))
    except DraftsmithError as error:
        log(f"error: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
