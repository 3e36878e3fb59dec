"""Which way of finding answers serves a template: all are tried on samples and compared with one another."""

from __future__ import annotations

import re
from collections.abc import Sequence

from draftsmith.chat import Chat
from draftsmith.conversations import Conversation, Unusable
from draftsmith.errors import DraftsmithError
from draftsmith.log import log
from draftsmith.tokenize.marks import Marks, learn_marks
from draftsmith.tokenize.masking import METHODS, MaskedRow, Masker, Method

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# With these another method may do better; the other reasons lie in the conversation.
_METHOD_FAILED = ("not_aligned", "template_refused", "template_failed")


def choose(chat: Chat, samples: Sequence[Conversation], asked: str = "auto") -> tuple[Method, Marks]:
    """Try every method on ``samples`` and take the first that works on more than half of those that any can handle.

    ``asked`` names a method to use instead of 'auto'; then nothing is compared. Raises :class:`DraftsmithError` when two
    methods find different tokens in a sample, which it shows, or when none works.
    """
    marks = learn_marks(chat)
    if not marks.ends and not marks.stop:
        log(
            "warning: the draft learns no end of turn: the chat template writes none, and the target's generation_config.json "
            "does not list the mark of the next role under eos_token_id"
        )
    if asked != "auto":
        return next(method for method in METHODS if method == asked), marks
    found: dict[Method, dict[int, list[MaskedRow]]] = {}
    handled: dict[Method, set[int]] = {}
    reasons: dict[Method, str] = {}
    for method in METHODS:
        if method == "generation_tags" and not (chat.fast and _GENERATION.search(chat.template)):
            continue
        masker = Masker(chat, method, marks)
        found[method], handled[method] = {}, set()
        for number, sample in enumerate(samples):
            try:
                found[method][number] = masker.rows(sample)
            except Unusable as unusable:
                reasons.setdefault(method, f"{sample.where}: {unusable}")
                if unusable.reason in _METHOD_FAILED:
                    continue
            handled[method].add(number)
    most = len(set().union(*handled.values()))
    chosen = next((method for method in METHODS if most and 2 * len(handled.get(method, ())) > most), None)
    if chosen is None:
        listed = "; ".join(f"{method}: {reason}" for method, reason in reasons.items()) or "there are none"
        raise DraftsmithError(
            f"in none of the first {len(samples)} conversations could an answer be found in the tokens ({listed})"
        )
    for method in METHODS:
        for number in sorted(set(found[chosen]) & set(found.get(method, ()))):
            _compare(chat, samples[number], chosen, found[chosen][number], method, found[method][number])
    agreeing = [method for method in METHODS if method != chosen and found.get(method)]
    log(f"answers are found by {chosen}" + (f", {' and '.join(agreeing)} agreeing" if agreeing else ""))
    return chosen, marks


def _compare(
    chat: Chat, sample: Conversation, one: str, rows: list[MaskedRow], other: str, others: list[MaskedRow]
) -> None:
    for row, second in zip(rows, others, strict=False):
        shown = [[r.ids[start:end] for start, end in r.spans] for r in (row, second)]
        comparable = len(rows) == len(others) and not any(r.straddled or r.restored for r in (row, second))
        if not comparable or shown[0] == shown[1]:
            continue
        left, right = next(((a, b) for a, b in zip(*shown, strict=False) if a != b), (shown[0][-1], shown[1][-1]))
        raise DraftsmithError(
            f"{sample.where}: the ways to find answers disagree: {one} finds "
            f"{chat.decode(left)!r}, {other} finds {chat.decode(right)!r}; if the first is right, set tokenize.mask: {one}"
        )
