"""What opens and what ends an answer, in token ids, learnt from small conversations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.chat import Chat
from draftsmith.conversations import Unusable


@dataclass(frozen=True)
class Marks:
    """What :func:`learn_marks` found, each empty when it did not.

    ``header`` are the token ids that open an answer, ``ends`` ids that end one, and ``tail`` is how every prompt ends,
    from its last special token on: in text, the end of the header.
    """

    header: tuple[int, ...] = ()
    ends: frozenset[int] = frozenset()
    tail: tuple[int, ...] = ()


def learn_marks(chat: Chat) -> Marks:
    """Find what opens and what ends an answer by rendering two greetings."""
    try:
        before, prompt, closed = (_greeting(chat, "Hello", step) for step in range(3))
        other = _greeting(chat, "Bye", 1)
    except (Unusable, TypeError):
        return Marks()
    ids, prompt_ids, other_ids = (chat.encode(text).ids for text in (closed, prompt, other))
    begin, end = common(chat.encode(before).ids, ids), common(prompt_ids, ids)
    header = ids[begin:end]
    if closed.startswith(prompt) and end < len(prompt_ids):
        # The tokenizer joins the end of the header with the answer, so that the header cannot be searched for.
        header = []
    elif not header and end and ids[end - 1] in chat.special:
        # Without a header of its own, an answer follows the mark that ends the user's turn.
        header = [ids[end - 1]]
    ends = [token for token in ids[end:] if token in chat.special][-1:]
    tail = _from_last_special(chat, prompt_ids)
    return Marks(tuple(header), frozenset(ends), tail if tail == _from_last_special(chat, other_ids) else ())


def _greeting(chat: Chat, text: str, step: int) -> str:
    user = {"role": "user", "content": text}
    messages = [user, {"role": "assistant", "content": "Hi"}] if step == 2 else [user]
    return chat.render(messages, None, prompt=step == 1)


def _from_last_special(chat: Chat, ids: list[int]) -> tuple[int, ...]:
    last = next((place for place in range(len(ids) - 1, -1, -1) if ids[place] in chat.special), None)
    return () if last is None else tuple(ids[last:])


def common(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Length of the common beginning."""
    return next(
        (place for place, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )
