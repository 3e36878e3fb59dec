"""merge_answers: the conversations with the target's answers, in the order of the sources, whatever the number of shards was."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from draftsmith.chat import Chat
from draftsmith.config import Config
from draftsmith.conversations import Conversation
from draftsmith.errors import DraftsmithError
from draftsmith.files import read_json, read_object
from draftsmith.regenerate import outcome
from draftsmith.regenerate.identity import fingerprint
from draftsmith.regenerate.journal import Journal
from draftsmith.regenerate.wanted import Questions, shard_of


def run(
    config: Config, *, target: Path, workdir: Path, shards: Sequence[Path], conversations: Path, report: Path
) -> None:
    """Write ``conversations`` (JSONL) and ``report`` from what all ``shards`` (1-of-N to N-of-N) had answered into ``workdir``.

    Raises :class:`DraftsmithError` when a shard's answers were made by other settings or are not there any more, or more than
    ``data.max_dropped_fraction`` of the conversations got no answer. The files of the shards that would have to ask again are
    then removed, so that the next run lets them: a file of a shard says that it has ended well.
    """
    described = read_json(target)
    key = fingerprint(config, described, Chat.load(described, config.tokenize.template_args))
    parts = [_read(path, key) for path in shards]
    try:
        journal = Journal(workdir / key)
    except DraftsmithError:
        # What lay in the damaged part is to be asked again once that is deleted.
        _ask_again(shards)
        raise
    asked = Questions()
    wanted = list(asked.read(config.data))
    failed = [entry for part in parts for entry in part["failed"]]
    _check_there(wanted, journal, {entry["key"] for entry in failed}, shards, workdir / key)
    try:
        written = outcome.write(config, described, asked, wanted, journal, failed, conversations)
    except DraftsmithError as error:
        if not failed:
            raise
        _ask_again(path for path, part in zip(shards, parts, strict=True) if part["failed"])
        raise DraftsmithError(
            f"{error}; the same command asks the {len(failed)} again on which the engine or server failed"
        ) from None
    finally:
        asked.dropped.report("regenerate")
    figures = total([part["figures"] for part in parts])
    outcome.write_report(report, config, written, figures | {"failed": failed}, asked, key)
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


def _read(path: Path, key: str) -> dict[str, Any]:
    part = read_object(path, "failed", "figures", "fingerprint")
    if part["fingerprint"] != key:
        raise DraftsmithError(
            f"{path}: made with other settings or by another target; delete it, and run the same command again"
        )
    return part


def _check_there(
    wanted: Sequence[Conversation], journal: Journal, failed: set[str], shards: Sequence[Path], folder: Path
) -> None:
    """What has neither an answer nor an error was lost, or came to the data when its shard had ended."""
    lost = [one for one in wanted if (key := one.prompt_key()) not in journal and key not in failed]
    if not lost:
        return
    whose = sorted({shard_of(one, len(shards)) for one in lost})
    _ask_again(shards[place] for place in whose)
    raise DraftsmithError(
        f"{folder}: {len(lost)} conversations have no answer there, the first is {lost[0].where}: answers were removed, or the data "
        f"changed meanwhile; run the same command again, which asks for them (shard {', '.join(f'{place + 1}-of-{len(shards)}' for place in whose)})"
    )


def _ask_again(shards: Iterable[Path]) -> None:
    for path in shards:
        path.unlink()
