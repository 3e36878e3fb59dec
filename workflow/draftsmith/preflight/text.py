"""Checks of what the engine will be fed: rows, tokenizer, chat template."""

from __future__ import annotations

from typing import Any

from draftsmith.config import Tokenize
from draftsmith.conversations import Message, Unusable
from draftsmith.errors import DraftsmithError
from draftsmith.preflight.subject import MARGIN, Subject, needed
from draftsmith.rows import read_rows
from draftsmith.verdict import Found

TURNS: list[Message] = [
    {"role": "user", "content": "Which planet is called red?"},
    {"role": "assistant", "content": "Mars is called the red planet."},
    {"role": "user", "content": "How many moons does it have?"},
    {"role": "assistant", "content": "It has two moons, Phobos and Deimos."},
]
"""A conversation that every chat template must be able to render."""
# A model's vocabulary is padded, by some percent; a tokenizer of less than this share of it is another model's.
_LEAST_SHARE = 0.5
# The least that the config takes: no advice goes below it.
_LEAST_LENGTH: int = next(rule.ge for rule in Tokenize.model_fields["max_length"].metadata if hasattr(rule, "ge"))


def lengths(subject: Subject) -> Found:
    """Every row fits into the model's positions and into the engine's longest sequence."""
    longest = max(subject.lengths.values())
    # As a number, as text, or as '4k': vLLM's own reading of it counts.
    given = subject.config.engine.args.get("max_model_len")
    limits = [(subject.target.get("max_positions"), "the target has {} positions", "take another target")]
    if given is not None:
        mend = "raise engine.args.max_model_len"
        limits.append((_read_limit(subject, given), f"engine.args.max_model_len is {given}", mend))
    for limit, words, otherwise in limits:
        if isinstance(limit, int) and 0 < limit < longest + MARGIN:
            fitting = limit - MARGIN
            mend = f"lower tokenize.max_length to {fitting}" if fitting >= _LEAST_LENGTH else otherwise
            return "fail", f"the longest row has {longest} tokens, {words.format(limit)}; {mend}"
    positions = subject.target.get("max_positions") or "?"
    return (
        "ok",
        f"the longest of {len(subject.lengths)} rows has {longest} tokens; the target has {positions} positions",
    )


def _read_limit(subject: Subject, given: Any) -> int | None:
    """What vLLM makes of ``engine.args.max_model_len``; the number as it is, where vLLM does not start with the arguments."""
    try:
        return int(subject.view.configured.model_config.max_model_len)
    except DraftsmithError:
        return int(given) if str(given).isdecimal() else None


def vocabulary(subject: Subject) -> Found:
    """Tokens of the rows, and those that the tokenizer has, are tokens of the model."""
    size = subject.target["vocab_size"]
    needed(lambda: subject.lengths, "row lengths")
    largest = max(int(row.max()) for row in read_rows(subject.rows, ["input_ids"])["input_ids"])
    if largest >= size:
        return "fail", (
            f"{subject.rows} has token {largest}, the model's vocabulary ends at {size - 1}: the tokenizer is another model's"
        )
    chat = subject.chat
    tokens = len(chat.tokenizer)
    detail = f"largest token {largest} of {size}; the tokenizer has {tokens}"
    ends = sorted(end for end in chat.end_ids if end >= size)
    if ends:
        return (
            "fail",
            f"{detail}, of which the end-of-turn {ends[0]} is none of the model's: it is another model's tokenizer",
        )
    if tokens > size:
        return "warn", f"{detail}: {tokens - size} of them are none of the model's, though no row has one"
    if tokens < _LEAST_SHARE * size:
        return "warn", f"{detail}: is it this model's?"
    return "ok", detail


def template(subject: Subject) -> Found:
    """The chat template renders a conversation of two turns, with what was said in it, to tokens of the model."""
    chat = needed(lambda: subject.chat, "vocabulary")
    mend = "correct chat_template.jinja (or the key chat_template of tokenizer_config.json) beside the tokenizer, or tokenize.template_args"
    try:
        whole, prompt = chat.render(TURNS, None, prompt=False), chat.render(TURNS[:-1], None, prompt=True)
    except Unusable as error:
        return "fail", f"the chat template fails on a conversation of two turns ({error.detail}); {mend}"
    lost = [turn for turn in TURNS if turn["content"] not in whole]
    if lost:
        return "fail", f"the chat template leaves out what the {lost[0]['role']} said; {mend}"
    if TURNS[2]["content"] not in prompt:
        return "fail", f"the chat template leaves out the question when it asks for an answer; {mend}"
    ids = chat.encode(prompt).ids
    size = subject.target["vocab_size"]
    if not ids or max(ids) >= size:
        return "fail", (
            f"the chat template writes token {max(ids, default='none')}, the model's vocabulary ends at {size - 1}; {mend}"
        )
    return "ok", f"two turns are {len(chat.encode(whole).ids)} tokens"


def supervision(subject: Subject) -> Found:
    """The share of tokens that the draft learns from is what conversations usually have."""
    share = subject.tokenised["supervised"] / max(subject.tokenised["tokens"], 1)
    detail = f"{share:.0%} of {subject.tokenised['tokens']} tokens are supervised"
    return ("ok" if 0.05 <= share <= 0.95 else "warn"), detail


def evaluation(subject: Subject) -> Found:
    """There are prompts to ask the served draft in the end."""
    asked = (subject.tokenised.get("by_split") or {}).get("evaluation")
    if asked:
        return "ok", f"{asked} prompts are kept for the evaluation"
    mend = "raise tokenize.max_length, if their prompts are longer, give more conversations, or name some in `split`"
    if subject.tokenised.get("evaluation_per_domain") == 0:
        return (
            "warn",
            "no prompt is kept for the evaluation, as tokenize.evaluation_per_domain is 0: the draft cannot be measured",
        )
    return "fail", f"no prompt is kept for the evaluation, so the draft could not be measured in the end; {mend}"
