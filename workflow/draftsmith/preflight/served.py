"""The check that rows begin as vLLM's chat endpoint would begin them, byte for byte and token for token."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftsmith.chat import Chat, vllm_chat
from draftsmith.conversations import Unusable
from draftsmith.log import log
from draftsmith.preflight.subject import Subject, needed
from draftsmith.preflight.text import TURNS
from draftsmith.tokenize.marks import common
from draftsmith.verdict import Found

_MEND = (
    "make the template beside the tokenizer (chat_template.jinja) and tokenize.template_args those of the server, and the "
    "messages such as a client would send"
)
_TWO_TURNS = {"conversation_id": "of two turns", "source": "preflight", "messages": TURNS[:-1]}
_SHOWN_LINES = 60
_LINE = 120
_AROUND = 30


def prompts(subject: Subject) -> Found:
    """A sample of rows has the prompts that vLLM renders for their messages, tools and template arguments."""
    # Rows that were given as tokens have no messages; the template is compared all the same.
    sample = subject.tokenised.get("served_sample") or [_TWO_TURNS]
    chat = needed(lambda: subject.chat, "vocabulary")
    served = vllm_chat.ServedChat(needed(lambda: subject.view, "engine arguments").configured)
    arguments = subject.config.tokenize.template_args
    rows = _rows(subject.rows, [one["row_id"] for one in sample if "row_id" in one])
    differently_cut = 0
    for one in sample:
        found, ids = compare(chat, served, one, arguments)
        if found:
            return found
        row = rows.get(one.get("row_id", ""))
        if row is None:
            continue
        begin = row[: one["prompt_tokens"]]
        if begin != ids:
            if chat.decode(begin) != chat.decode(ids):
                return "fail", _stale(chat, one, begin, ids)
            differently_cut += 1
    of = len({one["source"] for one in sample})
    detail = f"{len(sample)} prompts of {of} {'source' if of == 1 else 'sources'} are what vLLM sends, byte for byte"
    if differently_cut:
        return "warn", f"{detail}, but {differently_cut} rows cut the text of earlier answers into other tokens"
    return "ok", detail


def _rows(path: Path, wanted: Sequence[str]) -> dict[str, Any]:
    """Token ids of the rows ``wanted``; some may be kept for evaluation, or left out as nearly the same as others."""
    import pyarrow.parquet as pq

    if not wanted:
        return {}
    table = pq.read_table(path, columns=["row_id", "input_ids"], filters=[("row_id", "in", list(wanted))])
    return dict(zip(table["row_id"].to_pylist(), table["input_ids"].to_pylist(), strict=True))


def compare(
    chat: Chat, served: vllm_chat.ServedChat, sample: Mapping[str, Any], arguments: Mapping[str, Any]
) -> tuple[Found | None, list[int]]:
    """What is wrong with a sample's prompt (None: nothing), and its token ids as the rows have them."""
    name = _name(sample)
    messages, tools = sample["messages"], sample.get("tools")
    try:
        ours = chat.render(messages, tools, prompt=True)
    except Unusable as error:
        return ("fail", f"{name}: its prompt cannot be rendered any more ({error}); run the stage tokenize again"), []
    ids = chat.encode(ours).ids
    try:
        theirs = served.prompt(messages, tools, arguments)
    except vllm_chat.Refused as error:
        if served.by_harmony:
            # Its vocabulary is fetched from the web by a library of its own.
            return (
                "warn",
                f"vLLM builds this target's prompts by openai-harmony, which does not run here: {error}",
            ), ids
        return ("fail", f"vLLM refuses the prompt of {name}: {error}; {_MEND}"), ids
    text = chat.decode(theirs.ids) if theirs.text is None else theirs.text
    # Where vLLM went from messages to tokens, there is but the text that both are decoded to.
    if text != (chat.decode(ids) if theirs.text is None else ours):
        _show(chat, name, ours, text)
        place = common(ours, text)
        return (
            "fail",
            f"the prompt of {name} is not the one that vLLM sends: behind {ours[max(place - _AROUND, 0) : place]!r} the rows "
            f"have {ours[place : place + _AROUND]!r}, vLLM {text[place : place + _AROUND]!r} (the difference as a whole is "
            f"above); {_MEND}",
        ), ids
    if theirs.ids != ids:
        place = common(ids, theirs.ids)
        pieces = [chat.decode(tokens[place : place + 1]) for tokens in (ids, theirs.ids)]
        return (
            "fail",
            f"the prompt of {name} is the same text for vLLM, but other tokens: token {place + 1} is {pieces[0]!r} in the rows "
            f"and {pieces[1]!r} for vLLM; give both the same tokenizer files and versions of transformers and tokenizers",
        ), ids
    return None, ids


def _name(sample: Mapping[str, Any]) -> str:
    # Samples of an earlier version do not tell where they are from.
    return sample.get("where") or f"conversation {sample['conversation_id']} ({sample['source']})"


def _stale(chat: Chat, sample: Mapping[str, Any], begin: Sequence[int], ids: Sequence[int]) -> str:
    place = common(begin, ids)
    pieces = [chat.decode(tokens[max(place - 5, 0) : place + 10]) for tokens in (begin, ids)]
    return (
        f"the row of {_name(sample)} does not begin as it would be rendered now: "
        f"it has {pieces[0]!r}, and now comes {pieces[1]!r}; where the template writes the date, fix it in "
        "tokenize.template_args, else run the stage tokenize again"
    )


def _show(chat: Chat, name: str, ours: str, theirs: str) -> None:
    lines = list(
        difflib.unified_diff(
            _lines(chat, ours), _lines(chat, theirs), f"the rows: {name}", f"vLLM: {name}", lineterm="", n=2
        )
    )
    for line in lines[:_SHOWN_LINES]:
        log(line)
    if len(lines) > _SHOWN_LINES:
        log(f"… and {len(lines) - _SHOWN_LINES} lines more")


def _lines(chat: Chat, text: str) -> list[str]:
    """``text`` in lines that can be looked at: broken also before special tokens, line breaks shown as such."""
    marks = sorted((chat.decode([token]) for token in chat.special), key=len, reverse=True)
    pattern = "|".join(re.escape(mark) for mark in marks if mark)
    pieces = re.split(f"(?={pattern})", text) if pattern else [text]
    pieces = [line for piece in pieces for line in piece.splitlines(keepends=True)]
    return [line[start : start + _LINE].replace("\n", "\\n") for line in pieces for start in range(0, len(line), _LINE)]
