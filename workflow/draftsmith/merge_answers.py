"""merge_answers: the conversations with the target's answers, in the order of the sources, whatever the number of shards was."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith.chat import Chat
from draftsmith.config import Config
from draftsmith.errors import DraftsmithError
from draftsmith.files import read_json
from draftsmith.regenerate import outcome
from draftsmith.regenerate.identity import fingerprint
from draftsmith.regenerate.journal import Journal
from draftsmith.regenerate.wanted import Questions


def run(
    config: Config, *, target: Path, workdir: Path, shards: Sequence[Path], conversations: Path, report: Path
) -> None:
    """Write ``conversations`` (JSONL) and ``report`` from what all ``shards`` had answered into ``workdir``.

    Raises :class:`DraftsmithError` when a shard's answers were made by other settings, or more than
    ``data.max_dropped_fraction`` of the conversations got no answer.
    """
    described = read_json(target)
    key = fingerprint(config, described, Chat.load(described, config.tokenize.template_args))
    parts = [read_json(path) for path in shards]
    for path, part in zip(shards, parts, strict=True):
        if part["fingerprint"] != key:
            raise DraftsmithError(f"{path}: made with other settings or by another target; delete it, and run it again")
    asked = Questions()
    wanted = list(asked.read(config.data))
    figures = total([part["figures"] for part in parts])
    figures["failed"] = [entry for part in parts for entry in part["failed"]]
    try:
        written = outcome.write(
            config, described, asked, wanted, Journal(workdir / key), figures["failed"], conversations
        )
    finally:
        asked.dropped.report("regenerate")
    outcome.write_report(report, config, written, figures, asked, key)
    outcome.say(written)


def total(shards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of all shards: tokens and seconds added up, and by these the tokens/s of one shard's engine or servers."""
    tokens, seconds = (sum(figures[name] for figures in shards) for name in ("tokens", "seconds"))
    return {
        "tokens": tokens,
        "seconds": round(seconds, 2),
        "tokens_per_second": round(tokens / seconds, 1) if tokens and seconds else None,
        "by": next((figures["by"] for figures in shards if figures["by"]), None),
        "reused": sum(figures["reused"] for figures in shards),
        "shards": len(shards),
    }
