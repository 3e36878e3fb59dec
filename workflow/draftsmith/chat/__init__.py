"""The target's tokenizer and chat template, used as a server uses them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.chat.as_served import Shape
from draftsmith.chat.as_served import tools as served_tools
from draftsmith.chat.steady_template import SteadyTemplate
from draftsmith.conversations import Message, Unusable
from draftsmith.errors import DraftsmithError
from draftsmith.log import log

# Conversations of which each rendering is also made apart, in case that the installed libraries do it in another way.
_COMPARED = 8


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of a text; with a fast tokenizer ``place`` tells where a token (by number) starts and ends in it, in characters."""

    ids: list[int]
    place: Callable[[int], tuple[int, int]] | None


class Chat:
    """Renders messages and encodes what came out.

    ``special`` are ids of tokens that mark structure and never come from plain text; ``end_ids`` those that end a
    generation (the tokenizer's and the generation config's). ``template`` is the template's source.
    """

    def __init__(self, tokenizer: Any, template_args: dict[str, Any], end_ids: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.fast = bool(getattr(tokenizer, "is_fast", False))
        template = getattr(tokenizer, "chat_template", None)
        if not template:
            raise DraftsmithError(
                f"{getattr(tokenizer, 'name_or_path', 'the target')}: the tokenizer has no chat template; put the one "
                "that the server uses beside it as chat_template.jinja"
            )
        self.template = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
        self._args = template_args
        named = template if isinstance(template, dict) else {"default": template}
        self._shape = Shape.of(str(named.get("default", "")))
        self._arguments_as_text = False
        self._steady = SteadyTemplate.of(template) if isinstance(template, str) else None
        self._header: str | None = None
        self._encoded: dict[str, Encoded] = {}
        self._compared = 0
        self._added = dict(tokenizer.added_tokens_decoder)
        eos = tokenizer.eos_token_id
        self.end_ids = frozenset([*end_ids, *([] if eos is None else [eos])])
        marked = {token for token, added in self._added.items() if added.special}
        self.special = frozenset(marked | set(tokenizer.all_special_ids) | self.end_ids)

    @classmethod
    def load(cls, target: dict[str, Any], template_args: dict[str, Any]) -> Chat:
        """Open the tokenizer of ``target`` (the content of target.json)."""
        from transformers import AutoTokenizer

        folder = Path(target["path"])
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=target["trust_remote_code"])
        generation = folder / "generation_config.json"
        ends = json.loads(generation.read_text()).get("eos_token_id") if generation.is_file() else None
        chat = cls(tokenizer, template_args, [] if ends is None else [ends] if isinstance(ends, int) else ends)
        if "strftime_now" in chat.template:
            log(
                "the chat template can write today's date, which changes every row from day to day; if it takes the "
                "date as an argument, fix it in tokenize.template_args"
            )
        return chat

    @property
    def steady(self) -> bool:
        """Whether one rendering tells all the earlier ones, as :class:`SteadyTemplate` has it."""
        return self._steady is not None

    @property
    def template_sha256(self) -> str:
        """SHA-256 of the template's source, in hex."""
        return hashlib.sha256(self.template.encode()).hexdigest()

    def render(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None, *, prompt: bool) -> str:
        """The text of ``messages``; ``prompt`` adds the header of the answer to come.

        Raises :class:`Unusable` when the template refuses the messages or fails on them.
        """
        return self._render_by(None, messages, tools, prompt)

    def renderings(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None, answers: Sequence[int], *, prompts: bool
    ) -> tuple[list[str], list[str]]:
        """The texts of the prompts of the messages at ``answers`` (none without ``prompts``), and up to and with each.

        By one rendering where the template is known to only append, and by one each where it is not. Raises as
        :meth:`render` does.
        """
        found = self._by_pieces(messages[: answers[-1] + 1], tools, answers, prompts)
        if found is not None and self._compared >= _COMPARED:
            return found
        closed = [self.render(messages[: index + 1], tools, prompt=False) for index in answers]
        asked = [self.render(messages[:index], tools, prompt=True) for index in answers] if prompts else []
        if found is not None:
            self._compared += 1
            if found != (asked, closed):
                log("one rendering of a conversation does not tell the earlier ones; each is rendered apart")
                self._steady = None
        return asked, closed

    def _by_pieces(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None, answers: Sequence[int], prompts: bool
    ) -> tuple[list[str], list[str]] | None:
        steady = self._steady
        # A server may move developers' messages.
        if steady is None or any(message["role"] == "developer" for message in messages):
            return None
        try:
            rendered = self._render_by(steady.marked, messages, tools, False)
        except Unusable:
            return None
        pieces = steady.pieces(rendered, len(messages), answers[0])
        if pieces is None:
            return None
        starts = ["".join(pieces[:index]) for index in answers]
        header = self._header
        if prompts and header is None:
            header = self.render(messages[: answers[0]], tools, prompt=True).removeprefix(starts[0])
            self._header = header if steady.fixed_prompt else None
        closed = [f"{start}{pieces[index]}{steady.closing}" for start, index in zip(starts, answers, strict=True)]
        return [f"{start}{header}" for start in starts] if prompts else [], closed

    def _render_by(
        self, template: str | None, messages: Sequence[Message], tools: list[dict[str, Any]] | None, prompt: bool
    ) -> str:
        try:
            return self._render(template, messages, tools, prompt)
        except TypeError as error:
            # Templates either join a call's arguments to text (older ones) or turn them into JSON (the convention now).
            if self._arguments_as_text or not any("tool_calls" in message for message in messages):
                raise _failed(error) from error
        self._arguments_as_text = True
        try:
            return self._render(template, messages, tools, prompt)
        except (Unusable, TypeError) as error:
            self._arguments_as_text = False
            raise _failed(error) from error

    def _render(
        self, template: str | None, messages: Sequence[Message], tools: list[dict[str, Any]] | None, prompt: bool
    ) -> str:
        from jinja2 import TemplateError

        try:
            return str(
                self.tokenizer.apply_chat_template(
                    self.template_messages(messages),
                    tools=served_tools(tools),
                    tokenize=False,
                    chat_template=template,
                    add_generation_prompt=prompt,
                    **self._args,
                )
            )
        except TemplateError as error:
            raise Unusable("template_refused", " ".join(str(error).split())[:200]) from error
        except (ValueError, KeyError, IndexError, AttributeError) as error:
            raise _failed(error) from error

    def template_messages(self, messages: Sequence[Message]) -> list[Message]:
        """The messages in the shape in which a server hands them to the template."""
        return self._shape.messages(messages, arguments_as_text=self._arguments_as_text)

    def tagged(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> tuple[list[int], list[int]]:
        """Token ids of ``messages`` and for each 1 where the template's ``{% generation %}`` block wrote it, else 0."""
        encoded = self.tokenizer.apply_chat_template(
            self.template_messages(messages),
            tools=served_tools(tools),
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **self._args,
        )
        return list(encoded["input_ids"]), list(encoded["assistant_masks"])

    def encode_many(self, texts: Sequence[str]) -> dict[str, Encoded]:
        """:meth:`encode` of each: together they cost a quarter less than one by one. Also for another thread.

        Empty for a slow tokenizer, with which nothing is gained.
        """
        if not self.fast or not texts:
            return {}
        encoded = self.tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)
        found = zip(texts, encoded["input_ids"], encoded.encodings, strict=True)
        return {text: Encoded(ids, places.token_to_chars) for text, ids, places in found}

    def have(self, encoded: dict[str, Encoded]) -> None:
        """Let :meth:`encode` take these texts, and no others, from ``encoded``, each once."""
        self._encoded = encoded

    def encode(self, text: str) -> Encoded:
        """Token ids of a rendered text, to which nothing is added: the template wrote the special tokens."""
        if (known := self._encoded.pop(text, None)) is not None:
            return known
        if not self.fast:
            return Encoded(list(self.tokenizer(text, add_special_tokens=False)["input_ids"]), None)
        encoded = self.tokenizer(text, add_special_tokens=False, return_attention_mask=False)
        # Only few places are asked for, so a list of all would cost more than it is worth.
        return Encoded(encoded["input_ids"], encoded.encodings[0].token_to_chars)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def template_ids(self) -> set[int]:
        """Ids of added tokens whose text the template's source contains: those that it may emit."""
        return {token for token, added in self._added.items() if added.content in self.template}


def _failed(error: Exception) -> Unusable:
    return (
        error
        if isinstance(error, Unusable)
        else Unusable("template_failed", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    )
