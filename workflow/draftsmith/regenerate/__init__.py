"""regenerate: the target writes its own answers to one shard of the source's questions, for the draft to learn.

vLLM does it in this process, or an OpenAI-compatible server is asked (``regenerate.endpoint``). Each conversation goes on
by itself: as soon as an answer is there, the next question is asked, so that nobody waits for the slowest answer of a
batch. What is finished is kept in part files, in a folder for the target and the settings: a run that was ended goes on,
and one that asks only for what is there loads no model and sends no request.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from draftsmith import engine
from draftsmith.chat import Chat
from draftsmith.config import Config
from draftsmith.conversations import Conversation
from draftsmith.extract_shard.plan import parse_scatteritem
from draftsmith.files import read_json, write_json
from draftsmith.log import log
from draftsmith.regenerate.asking import Answerer
from draftsmith.regenerate.endpoint import Endpoint
from draftsmith.regenerate.generator import Generator
from draftsmith.regenerate.identity import fingerprint
from draftsmith.regenerate.journal import Journal, Ledger
from draftsmith.regenerate.round import Round, ends, room
from draftsmith.regenerate.wanted import Questions, shard_of
from draftsmith.signals import EXIT_TERMINATED, Termination

REASONS = {
    "no_question": "no user message, as in rows that are tokens already",
    "duplicate": "it asks what another conversation asks",
    "prompt_too_long": "the question lies behind tokenize.max_length",
    "empty_answer": "the target ended its turn at once",
    "truncated": "the answer was cut at regenerate.max_tokens, and regenerate.unfinished does not keep it",
    "calls_differ": "the target called other tools than the source, whose replies do not fit then",
    "failed": "the engine or the server failed on it; the report has the traceback",
}
"""Reason codes of this stage with what each means, besides those of conversations.py and tokenize/masking.py."""


def run(config: Config, *, target: Path, workdir: Path, scatteritem: str, report: Path) -> None:
    """Have the questions of the shard ``scatteritem`` (as ``1-of-2``) answered and write ``report`` of it.

    Parts go to a folder in ``workdir`` that all shards share. Raises :class:`DraftsmithError` when more than
    ``data.max_dropped_fraction`` of all conversations failed, or a server is not there or has another target.
    """
    described = read_json(target)
    chat = Chat.load(described, config.tokenize.template_args)
    key = fingerprint(config, described, chat)
    folder = workdir / key
    journal = Journal(folder)
    asked = Questions()
    place, count = parse_scatteritem(scatteritem)
    mine = [conversation for conversation in asked.read(config.data) if shard_of(conversation, count) == place]
    todo = [conversation for conversation in mine if conversation.prompt_key() not in journal]
    reused = len(mine) - len(todo)
    log(f"regenerate: shard {scatteritem}: {len(mine)} conversations, {reused} are answered already ({folder})")
    ledger = Ledger(folder)
    figures: dict[str, Any] = {"tokens": 0, "seconds": 0.0, "tokens_per_second": None, "by": None}
    if todo:
        with Termination() as termination:
            round_ = Round(config, described, chat, journal, ledger, termination)
            answerer = _answerer(config, described, chat, todo)
            figures = round_.answer_all(todo, answerer, asked.most_failed(config.data.max_dropped_fraction))
        if termination.asked:
            log(
                f"regenerate: ended by {termination.name}; {len(journal)} conversations are kept, run the same command again to go on"
            )
            sys.exit(EXIT_TERMINATED)
    ledger.show()
    write_json(
        report,
        {
            "conversations": len(mine),
            "fingerprint": key,
            "failed": ledger.entries,
            "figures": figures | {"reused": reused},
        },
    )


def _answerer(config: Config, target: dict[str, Any], chat: Chat, todo: list[Conversation]) -> Answerer:
    if config.regenerate.endpoints:
        return Endpoint(config, target, chat, room(config, target), sorted(ends(chat)), todo)
    engine.check_granted(config, None)
    return Generator(config, target, room(config, target), sorted(ends(chat)))
