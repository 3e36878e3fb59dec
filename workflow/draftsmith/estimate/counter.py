"""Counts tokens without transformers, whose import alone takes longer than an estimate may."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from draftsmith.conversations import Message

CHARACTERS = 4.0
"""Characters of a token, where no tokenizer tells; English text has 4 to 5 with a vocabulary of 100,000."""
# Tokens that a template puts around a message, where it cannot be rendered.
_AROUND = 5


class Counter:
    """``how`` says what the counts rest on, ``overhead`` is what a message costs besides its text."""

    def __init__(
        self, length: Callable[[str], int], how: str, render: Callable[[Sequence[Message]], str] | None = None
    ) -> None:
        self.text, self.how, self._render = length, how, render
        self.overhead = _AROUND

    def conversation(self, messages: Sequence[Message]) -> int:
        """Tokens of a whole conversation."""
        if self._render is not None:
            try:
                return self.text(self._render(messages))
            except Exception:
                # Templates refuse in many ways; the tokenizer still counts the text.
                pass
        return sum(self.text(message["content"]) + self.overhead for message in messages)


def counter(folder: Path | None, template_args: dict[str, Any]) -> Counter:
    """The best counter that the files in ``folder`` allow."""
    path = None if folder is None else folder / "tokenizer.json"
    if folder is None or path is None or not path.is_file():
        return Counter(
            lambda text: round(len(text) / CHARACTERS),
            f"at {CHARACTERS:g} characters a token, as no tokenizer.json is there",
        )
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        # The library raises nothing more precise.
        return Counter(
            lambda text: round(len(text) / CHARACTERS),
            f"at {CHARACTERS:g} characters a token, as {path.name} cannot be read ({type(error).__name__})",
        )

    def length(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    return Counter(length, "by the target's tokenizer", _renderer(folder, template_args))


def _renderer(folder: Path, template_args: dict[str, Any]) -> Callable[[Sequence[Message]], str] | None:
    """The chat template, in a sandbox and without transformers' additions to Jinja."""
    source = _template(folder)
    if source is None:
        return None
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    environment.globals.update({"raise_exception": _refuse, "strftime_now": lambda form: form})
    try:
        template = environment.from_string(source)
    except Exception:
        # A tag that only transformers knows.
        return None
    return lambda messages: template.render(
        messages=messages, add_generation_prompt=False, bos_token="", eos_token="", **template_args
    )


def _template(folder: Path) -> str | None:
    try:
        if (folder / "chat_template.jinja").is_file():
            return (folder / "chat_template.jinja").read_text()
        found = json.loads((folder / "tokenizer_config.json").read_text()).get("chat_template")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def _refuse(reason: str) -> None:
    raise ValueError(reason)
