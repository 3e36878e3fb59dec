"""What a regeneration leaves: the conversations with the target's answers, and the figures of the report."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.config import Config
from draftsmith.conversations import Conversation
from draftsmith.errors import DraftsmithError
from draftsmith.files import atomic_path, write_json
from draftsmith.log import log
from draftsmith.regenerate import talks
from draftsmith.regenerate.journal import Journal
from draftsmith.regenerate.talks import Talk
from draftsmith.regenerate.wanted import Questions


@dataclass
class Written:
    """Counts of what was written: conversations and answers, reasons why answers ended and why conversations were cut."""

    kept: int = 0
    answers: int = 0
    answer_tokens: int = 0
    finishes: Counter[str] = field(default_factory=Counter)
    shortened: Counter[str] = field(default_factory=Counter)

    def add(self, talk: Talk) -> None:
        """Count a conversation."""
        self.kept += 1
        self.answers += len(talk.answers)
        self.answer_tokens += sum(given.get("tokens") or len(given.get("token_ids", ())) for given in talk.answers)
        self.finishes.update(given["finish_reason"] for given in talk.answers)
        if talk.ended:
            self.shortened[talk.ended] += 1


def write(
    config: Config,
    target: dict[str, Any],
    asked: Questions,
    wanted: Sequence[Conversation],
    journal: Journal,
    failed: Sequence[dict[str, Any]],
    path: Path,
) -> Written:
    """Write the answered conversations of ``wanted``, in their order; the others are counted in ``asked.dropped``.

    Raises :class:`DraftsmithError` when too many of all conversations, or all of them, got no answer.
    """
    written, dropped = Written(), asked.dropped
    errors = {entry["key"]: entry["error"] for entry in failed}
    drop_whole = config.regenerate.unfinished == "drop_conversation"
    with atomic_path(path) as temporary, open(temporary, "w") as lines:
        for conversation in wanted:
            where, key = conversation.where, conversation.prompt_key()
            if key not in journal:
                dropped.add(where, "failed", errors.get(key, ""))
                continue
            talk = talks.restored(conversation, journal.get(key))
            if not talk.answers or (drop_whole and talk.ended == "truncated"):
                dropped.add(where, str(talk.ended), talk.detail)
                continue
            written.add(talk)
            row = talks.completed(talk, target["fingerprint"]).as_row()
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")
        dropped.check(asked.total, config.data.max_dropped_fraction, ("duplicate",))
        if not written.kept:
            raise DraftsmithError("no conversation got an answer; is there a user message in any?")
    return written


def write_report(
    path: Path,
    config: Config,
    written: Written,
    figures: dict[str, Any],
    asked: Questions,
    key: str,
) -> None:
    """Write the figures of all shards (:func:`draftsmith.merge_answers.total`) as JSON."""
    write_json(
        path,
        {
            "conversations": asked.total,
            "sources": [source.as_json() for source in asked.sources],
            "kept": written.kept,
            "answers": written.answers,
            "answer_tokens": written.answer_tokens,
            "finish_reasons": dict(written.finishes),
            "dropped": dict(asked.dropped.counts.most_common()),
            "dropped_examples": asked.dropped.examples,
            "shortened": dict(written.shortened),
            "reused": figures["reused"],
            "shards": figures["shards"],
            "generated_tokens": figures["tokens"],
            "seconds": figures["seconds"],
            "tokens_per_second": figures["tokens_per_second"],
            "by": figures["by"],
            "failed": figures["failed"],
            "fingerprint": key,
            "settings": config.regenerate.model_dump(mode="json"),
        },
    )


def say(written: Written) -> None:
    """The last line of the log."""
    tokens = f" of {written.answer_tokens} tokens" if written.answer_tokens else ""
    log(f"regenerate: {written.kept} conversations with {written.answers} answers{tokens}, {dict(written.finishes)}")
