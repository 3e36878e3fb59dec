"""What opens and what ends an answer, in token ids, learnt from small conversations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.chat import Chat
from draftsmith.conversations import Message, Unusable

_ASKED: Message = {"role": "user", "content": "Hello"}
_ANSWERED: Message = {"role": "assistant", "content": "Hi"}
_AGAIN: Message = {"role": "user", "content": "Bye"}
_CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {}}}],
}
_REPLY: Message = {"role": "tool", "content": "Hi", "tool_call_id": "call00001"}


@dataclass(frozen=True)
class Marks:
    """What :func:`learn_marks` found, each empty when it did not.

    ``header`` are the token ids that open an answer, ``ends`` ids that end one, and ``tail`` is how every prompt ends,
    from its last special token on: in text, the end of the header. ``opens`` is what a prompt adds to the header, such as the
    mark that opens the reasoning: it is asked, not answered.

    ``stop`` and ``stop_call`` are for templates that write no end of turn, such as GLM's, where the mark of the next role
    stands for it: the text of the token that the target stops with, behind an answer and behind a tool call.
    """

    header: tuple[int, ...] = ()
    ends: frozenset[int] = frozenset()
    tail: tuple[int, ...] = ()
    opens: tuple[int, ...] = ()
    stop: str = ""
    stop_call: str = ""

    def stop_after(self, message: Message) -> str:
        """What the target writes behind ``message`` and the template leaves to the next one; nothing if it was cut off."""
        if message.get("truncated"):
            return ""
        return self.stop_call if message.get("tool_calls") else self.stop


def learn_marks(chat: Chat) -> Marks:
    """Find what opens and what ends an answer by rendering small conversations."""
    try:
        before, prompt = (chat.render([_ASKED], None, prompt=prompt) for prompt in (False, True))
        closed = chat.render([_ASKED, _ANSWERED], None, prompt=False)
        other = chat.render([_AGAIN], None, prompt=True)
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
    opens = [] if closed.startswith(prompt) else prompt_ids[end:]
    ends = [token for token in ids[end:] if token in chat.special][-1:]
    stop = stop_call = ""
    if not ends:
        stop = _stop(chat, [_ASKED, _ANSWERED], _AGAIN)
        stop_call = _stop(chat, [_ASKED, _CALL], _REPLY) or stop
    elif not _ends_so_in_history(chat, ends[0]):
        # As with gpt-oss: the end of an answer cannot be searched for.
        header = []
    tail = _from_last_special(chat, prompt_ids)
    same = tail == _from_last_special(chat, other_ids)
    return Marks(tuple(header), frozenset(ends), tail if same else (), tuple(opens), stop, stop_call)


def _ends_so_in_history(chat: Chat, end: int) -> bool:
    try:
        whole = chat.render([_ASKED, _ANSWERED, _AGAIN, _ANSWERED], None, prompt=False)
    except (Unusable, TypeError):
        # A template of one turn has no history.
        return True
    return chat.encode(whole).ids.count(end) > 1


def _stop(chat: Chat, messages: Sequence[Message], following: Message) -> str:
    """The mark that opens ``following``, if it is one of the tokens that end a generation of the target."""
    try:
        closed, longer = (chat.render(given, None, prompt=False) for given in (messages, [*messages, following]))
    except (Unusable, TypeError):
        return ""
    ids = chat.encode(longer[len(closed) :]).ids if longer.startswith(closed) else []
    return chat.decode(ids[:1]) if ids and ids[0] in chat.end_ids else ""


def _from_last_special(chat: Chat, ids: list[int]) -> tuple[int, ...]:
    last = next((place for place in range(len(ids) - 1, -1, -1) if ids[place] in chat.special), None)
    return () if last is None else tuple(ids[last:])


def common(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Length of the common beginning."""
    return next(
        (place for place, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )
