"""Is it the target that a server has? Asked before the first question, and told in one sentence if not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from draftsmith.chat import Chat
from draftsmith.config import Regenerate
from draftsmith.conversations import Conversation, Message, Unusable
from draftsmith.errors import DraftsmithError
from draftsmith.log import log
from draftsmith.regenerate import talks
from draftsmith.regenerate.asking import Question
from draftsmith.regenerate.server import Server
from draftsmith.regenerate.shapes import MalformedReply, first_choice, token_ids

_SAMPLES = 4
_GREETING: list[Message] = [
    {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi, how can I help?"}, {"role": "user", "content": "Bye"},
]  # fmt: skip
# Short, so that a server which is not there is told of within seconds.
_TRIES = 3


async def examine(
    server: Server, settings: Regenerate, target: dict[str, Any], chat: Chat, room: int, todo: Sequence[Conversation]
) -> None:
    """Find out the model's name and how the server is asked; ``room`` is the longest prompt and answer, in tokens.

    Raises :class:`DraftsmithError` when the server is not there, refuses the key, has another model, renders or encodes
    a prompt otherwise than the target's own tokenizer, or has a shorter context than is needed.
    """
    from openai import APIConnectionError, APIStatusError, AuthenticationError, PermissionDeniedError

    where = server.address
    try:
        card = _model(await server.models(_TRIES), settings, target, where)
        server.model = str(card["id"])
        longest = card.get("max_model_len")
        if isinstance(longest, int) and longest < room:
            raise DraftsmithError(
                f"{where}: the server's context is {longest} tokens, but tokenize.max_length and regenerate.max_tokens need "
                f"{room} together; start it with --max-model-len {room} or more, or lower one of the two"
            )
        samples = _samples(chat, todo)
        compared = await _compare(server, chat, samples)
        await _choose_way(server, settings, samples)
    except APIConnectionError as error:
        raise DraftsmithError(
            f"{where}: no server answers there ({cause(error)}); start one, for instance by `vllm serve {target['path']}`, or "
            "correct regenerate.endpoint"
        ) from None
    except (AuthenticationError, PermissionDeniedError) as error:
        raise DraftsmithError(refused_key(server, settings, error.status_code)) from None
    except (MalformedReply, APIStatusError) as error:
        words = " ".join(str(error).split())
        raise DraftsmithError(
            f"{where}: this is no server of OpenAI's API ({type(error).__name__}: {words}); the address usually ends in /v1, "
            "correct regenerate.endpoint"
        ) from None
    how = "token ids" if server.way == "completions" else "messages, and its answers are encoded here"
    more = "" if compared else "; it has no /tokenize, so that its chat template could not be compared"
    log(f"regenerate: {where} serves {server.model}, is asked by {how}{more}")


def refused_key(server: Server, settings: Regenerate, status: int) -> str:
    """The sentence for 401 and 403."""
    named = settings.api_key_env
    mend = f"correct what {named} holds" if named else "name the variable that holds it in regenerate.api_key_env"
    return f"{server.address}: the server refuses the API key (HTTP {status}); {mend}"


def cause(error: BaseException) -> str:
    """The innermost exception's words, such as 'ConnectError: connection refused'."""
    inner = error
    while inner.__cause__ is not None:
        inner = inner.__cause__
    return f"{type(inner).__name__}: {' '.join(str(inner).split()) or 'no message'}"


def _model(cards: list[dict[str, Any]], settings: Regenerate, target: dict[str, Any], where: str) -> dict[str, Any]:
    """The card of the model to ask; one of another name is taken only if the config names it."""
    listed = ", ".join(str(card["id"]) for card in cards) or "nothing"
    card = next((card for card in cards if settings.model in (None, card["id"])), None)
    if card is None:
        raise DraftsmithError(
            f"{where}: the server has no model {settings.model!r} but {listed}; correct regenerate.model"
            if settings.model
            else f"{where}: the server has no model; start it with the target, {target['path']}"
        )
    if card.get("parent"):
        raise DraftsmithError(
            f"{where}: {card['id']} is an adapter of {card['parent']}, not the target; name the target in regenerate.model"
        )
    theirs = _names(card["id"], card.get("root"))
    if not theirs & _names(target["path"], target.get("source")):
        words = f"{card['id']}" + (f" ({card['root']})" if card.get("root") not in (None, card["id"]) else "")
        if settings.model is None:
            raise DraftsmithError(
                f"{where}: the server has {words}, but the target is {target.get('source') or target['path']}; serve the "
                "target there, or name the model in regenerate.model if it is the target under another name"
            )
        log(
            f"regenerate: {where} serves {words}, which by name is not the target; it is taken for it as regenerate.model says so"
        )
    return card


def _names(*given: Any) -> set[str]:
    """A model's names in full and without the folders before them."""
    names = {str(name).rstrip("/").removeprefix("package:").lower() for name in given if name}
    return names | {PurePosixPath(name).name for name in names}


def _samples(chat: Chat, todo: Sequence[Conversation]) -> list[Question]:
    """First prompts of some conversations, and one with a history, as far as the template renders them."""
    asked: list[tuple[str, list[Message], list[dict[str, Any]] | None]] = [
        (f"conversation {one.conversation_id}", talks.start(one).messages(asking=True), one.tools)
        for one in todo[:_SAMPLES]
    ]
    found = []
    for name, messages, tools in [*asked, ("a greeting", _GREETING, None)]:
        try:
            text = chat.render(messages, tools, prompt=True)
        except Unusable:
            continue
        found.append(Question(name, messages, tools, chat.encode(text).ids, text[-64:], max_tokens=1, seed=None))
    return found


async def _compare(server: Server, chat: Chat, samples: Sequence[Question]) -> bool:
    """Whether the server could be asked for its tokens of the samples; raises if they are others than ours."""
    for sample in samples:
        theirs = await server.tokenize(sample.messages, sample.tools)
        if theirs is None:
            return False
        if theirs != sample.prompt:
            ours = sample.prompt
            place = next(
                (k for k, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
            )
            raise DraftsmithError(
                f"{server.address}: the server renders the prompt of {sample.name} in another way than the target's tokenizer "
                f"and chat template, from token {place} on {_shown(chat, theirs, place)} instead of {_shown(chat, ours, place)}; "
                "serve the target with its own template, and with what tokenize.template_args says"
            )
    return bool(samples)


def _shown(chat: Chat, ids: Sequence[int], place: int) -> str:
    piece = ids[place : place + 8]
    known = [token for token in piece if 0 <= token < len(chat.tokenizer)]
    return f"{chat.decode(known)!r} ({', '.join(map(str, piece))})" if piece else "nothing"


async def _choose_way(server: Server, settings: Regenerate, samples: Sequence[Question]) -> None:
    """By token ids where the server gives back those of the answer, else by messages; each is tried with one token."""
    from openai import BadRequestError, NotFoundError, UnprocessableEntityError

    refusals = (BadRequestError, NotFoundError, UnprocessableEntityError, MalformedReply)
    if not samples:
        return
    sample = samples[0]
    if settings.api != "chat":
        try:
            choice = first_choice(await server.post("completions", sample))
            prompt = choice.get("prompt_token_ids", sample.prompt)
            if token_ids(choice, server.vocabulary) is not None and prompt in (None, sample.prompt):
                server.way = "completions"
                return
            found = "its answer has no token_ids"
        except refusals as error:
            found = " ".join(str(error).split())
        if settings.api == "completions":
            raise DraftsmithError(
                f"{server.address}: the server cannot be asked by token ids ({found}); set regenerate.api to chat or auto"
            )
    server.way = "chat"
    try:
        await server.post("chat", sample)
    except (BadRequestError, UnprocessableEntityError):
        # OpenAI's own arguments, then, and of the others only what the settings need.
        server.extended = False
        try:
            await server.post("chat", sample)
        except (BadRequestError, UnprocessableEntityError) as error:
            raise DraftsmithError(
                f"{server.address}: the server refuses the settings of `regenerate` ({' '.join(str(error).split())}); leave "
                "out those that it does not know"
            ) from None
