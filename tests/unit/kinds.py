"""Chat templates of the kinds that matter, from tests/unit/templates, each with a tokenizer that knows its special tokens."""
# ruff: noqa: RUF001 (DeepSeek writes its marks with this bar)

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import chats
from draftsmith.chat import Chat

_FOLDER = Path(__file__).with_name("templates")
# Where the target's own text stands in a template.
_ANSWER, _END = "{#answer#}", "{#end#}"


@dataclass(frozen=True)
class Kind:
    """A template and its tokenizer; ``ends`` are what the generation config of such a model lists.

    ``plain`` and ``thinking`` are template arguments for conversations without reasoning and with.
    """

    name: str
    special: tuple[str, ...]
    ends: tuple[str, ...]
    plain: dict[str, Any] = field(default_factory=dict)
    thinking: dict[str, Any] = field(default_factory=dict)

    @property
    def template(self) -> str:
        """The template's source."""
        return (_FOLDER / f"{self.name}.jinja").read_text(encoding="utf-8")

    @property
    def tagged(self) -> str:
        """The same with the target's text in ``{% generation %}`` blocks."""
        return self.template.replace(_ANSWER, "{%- generation -%}").replace(_END, "{%- endgeneration -%}")

    def chat(self, arguments: dict[str, Any], *, fast: bool = True, tagged: bool = False) -> Chat:
        """A chat with this template and a fast or a slow tokenizer."""
        tokenizer = _tokenizer(self.name, fast, tagged)
        return Chat(tokenizer, arguments, [tokenizer.convert_tokens_to_ids(end) for end in self.ends])


@cache
def _tokenizer(name: str, fast: bool, tagged: bool) -> Any:
    kind = KINDS[name]
    chats.SPECIAL[f"kind {name}"] = list(kind.special)
    make = chats.fast if fast else chats.slow
    tokenizer = make(kind.tagged if tagged else kind.template, f"kind {name}")
    tokenizer.eos_token = kind.ends[0]
    return tokenizer


KINDS = {
    kind.name: kind
    for kind in (
        Kind("chatml", ("<|im_start|>", "<|im_end|>", "<|endoftext|>"), ("<|im_end|>", "<|endoftext|>")),
        Kind(
            "llama3",
            ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>"),
            ("<|eot_id|>", "<|end_of_text|>"),
        ),
        Kind("gemma", ("<bos>", "<start_of_turn>", "<end_of_turn>", "<eos>"), ("<end_of_turn>", "<eos>")),
        Kind(
            "deepseek",
            (
                "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "<｜tool▁calls▁begin｜>",
                "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<｜tool▁output▁begin｜>",
                "<｜tool▁output▁end｜>", "<｜end▁of▁sentence｜>",
            ),
            ("<｜end▁of▁sentence｜>",),
            thinking={"thinking": True},
        ),
        Kind(
            "kimi",
            (
                "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>", "<think>", "</think>",
                "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
                "<|tool_calls_section_end|>",
            ),
            ("<|im_end|>",),
            plain={"thinking": False},
        ),
        Kind(
            "glm",
            ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
            ("<|endoftext|>", "<|user|>", "<|observation|>"),
        ),
        Kind(
            "mistral",
            (
                "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
                "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[THINK]", "[/THINK]",
            ),
            ("</s>",),
        ),
        Kind(
            "harmony",
            ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),
            ("<|return|>", "<|call|>"),
        ),
    )
}  # fmt: skip
