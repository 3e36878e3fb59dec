"""Whether the prompts of the evaluation were written by the template that the training rows were written by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

from draftsmith.errors import DraftsmithError
from draftsmith.evaluate_draft.faults import Served

# Rows that are compared; what a template writes is in all of them.
_ROWS = 256


def template(served: Served) -> Iterator[str]:
    """The target's template has changed since, or the prompts begin or end otherwise than what answers follow in the rows."""
    written_by = served.found("tokenize/tokenize.json").get("template_sha256")
    now = _template_now(served) if written_by else None
    if now and now != written_by:
        yield "template: the target's chat template is no longer the one that the rows were written by; run tokenize again"
    contexts = _contexts(served)
    if not contexts:
        return
    prompts = [list(question["prompt_token_ids"]) for question in served.questions]
    end = _common([context[::-1] for context in contexts])[::-1]
    if end and _share(prompt[-len(end) :] == end for prompt in prompts) < 0.5:
        yield (
            f"template: answers of the training rows come after the tokens {_shown(end)}, the prompts end with "
            f"{_shown(prompts[0][-len(end) :])}; render both with the same template and tokenize.template_args"
        )
    begin = _common(contexts)
    if begin and _share(prompt[: len(begin)] == begin for prompt in prompts) < 0.5:
        yield (
            f"template: training rows begin with the tokens {_shown(begin)}, the prompts with "
            f"{_shown(prompts[0][: len(begin)])}; render both with the same template and tokenize.template_args"
        )


def _template_now(served: Served) -> str | None:
    from draftsmith.chat import Chat

    try:
        return Chat.load(dict(served.target), {}).template_sha256
    except (DraftsmithError, OSError, ValueError, KeyError):
        # The checkpoint is gone or was replaced; nothing can be compared.
        return None


def _contexts(served: Served) -> list[list[int]]:
    """Of training rows, the tokens before the first answer; none where there are no rows to read."""
    from draftsmith.rows import read_rows

    try:
        rows = read_rows(served.results / "tokenize/rows.parquet", ["split", "input_ids", "span_starts"])
    except (DraftsmithError, OSError):
        return []
    rows = rows[(rows["split"] == "train") & (rows["span_starts"].map(len) > 0)]
    # From all over the file, as it may be ordered by source.
    rows = rows.iloc[:: max(1, len(rows) // _ROWS)]
    return [
        [int(token) for token in ids[: int(starts[0])]]
        for ids, starts in zip(rows["input_ids"], rows["span_starts"], strict=True)
    ]


def _common(lists: Sequence[Sequence[int]]) -> list[int]:
    """The longest beginning that all have."""
    return [tokens[0] for tokens in takewhile(lambda tokens: len(set(tokens)) == 1, zip(*lists, strict=False))]


def _share(values: Iterator[bool]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _shown(tokens: Sequence[Any], most: int = 12) -> str:
    shown = [str(token) for token in tokens[:most]]
    return f"[{', '.join(shown)}{', …' if len(tokens) > most else ''}]"
