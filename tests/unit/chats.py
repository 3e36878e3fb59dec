"""Tiny tokenizers with chat templates of the kinds that matter, for the tests of masking, tokenize and regenerate."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from draftsmith.chat import Chat
from draftsmith.conversations import Conversation

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The block holds the answer and its end of turn.
TAGGED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As SmolLM3 has it: header and line break are in the block.
TAGGED_WIDE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<|im_start|>assistant\n{{ m.content }}<|im_end|>\n"
    "{% endgeneration %}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As in some data sets' templates: only the text, its end of turn not.
TAGGED_NARROW = TAGGED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
# A block around the wrong thing.
TAGGED_WRONG = TAGGED.replace(
    "{% generation %}{{ m.content }}", "{{ m.content[:3] }}{% generation %}{{ m.content[3:] }}"
)
LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "<bos>{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# The system message goes into the last user message, so that it moves from turn to turn; no header before an answer.
MISTRAL = (
    "<s>{% set ns = namespace(last=-1, system='') %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% elif m.role == 'system' %}{% set ns.system = m.content %}{% endif %}{% endfor %}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST] {% if loop.index0 == ns.last and ns.system %}{{ ns.system }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
# Reasoning is shown in the last answer only.
QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last and m.reasoning_content %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The prompt opens the reasoning, and no answer shows any, not even the last.
DEEPSEEK = (
    "<|begin|>{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% elif m.role == 'assistant' %}"
    "<|Assistant|>{{ m.content }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
# The prompt opens the reasoning, and answers show an empty block.
KIMI = (
    "{% for m in messages %}<|im_{{ m.role if m.role in ('user', 'assistant') else 'system' }}|>{{ m.role }}<|im_middle|>"
    "{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<|call|>{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>"
    "{{ '<think></think>' if thinking is defined and not thinking else '<think>' }}{% endif %}"
)
SPECIAL = {
    "chatml": ["<|im_start|>", "<|im_end|>"],
    "llama3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "gemma": ["<bos>", "<start_of_turn>", "<end_of_turn>"],
    "mistral": ["<s>", "[INST]", "[/INST]", "</s>"],
    "deepseek": ["<|begin|>", "<|User|>", "<|Assistant|>", "<|end|>"],
    "kimi": ["<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>", "<think>", "</think>", "<|call|>"],
}  # fmt: skip


_WORDS = ("assistant user system model", "the answer is", "what is it", "\n\n", "hello hello", "The The")


def fast(
    template: str | None, special: str = "chatml", eos: str | None = None, words: Sequence[str] = _WORDS
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 300 ids or so, special tokens first."""
    names = SPECIAL[special]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    # Whole words and double line breaks are single tokens, as in large vocabularies.
    tokenizer.train_from_iterator(
        list(words) * 9,
        trainers.BpeTrainer(vocab_size=320, special_tokens=names, initial_alphabet=alphabet, show_progress=False),
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos or names[-1])
    wrapped.chat_template = template
    return wrapped


class Characters(PreTrainedTokenizer):
    """A slow tokenizer without offsets: one id a character (its code point), special tokens from 1000 on."""

    vocab_files_names: dict[str, str] = {}  # noqa: RUF012 (the base class has it so)

    def __init__(self, joined: str = "", **kwargs: Any) -> None:
        # ``joined`` is a text of two characters that is one token where it occurs.
        self._joined = joined
        super().__init__(**kwargs)

    @property
    def vocab_size(self) -> int:
        return 1000

    def get_vocab(self) -> dict[str, int]:
        return {chr(code): code for code in range(999)} | {self._joined or "joined": 999} | self.added_tokens_encoder

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return re.findall(f"{re.escape(self._joined)}|.", text, re.DOTALL) if self._joined else list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return 999 if token == self._joined else ord(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self._joined if index == 999 else chr(index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


def slow(template: str, special: str = "chatml", joined: str = "") -> Characters:
    """The slow tokenizer with the special tokens of a family as ids 1000, 1001, …"""
    tokenizer = Characters(joined=joined)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken(name, special=True, normalized=False) for name in SPECIAL[special]]}
    )
    tokenizer.eos_token = SPECIAL[special][-1] if special != "kimi" else "<|im_end|>"
    tokenizer.chat_template = template
    return tokenizer


def chat(template: str, special: str = "chatml", **template_args: Any) -> Chat:
    """A chat with the fast tokenizer."""
    eos = "<|im_end|>" if special == "kimi" else None
    return Chat(fast(template, special, eos), template_args)


def talk(*texts: str, system: str | None = None, name: str = "c", **more: Any) -> Conversation:
    """A conversation of alternating user and assistant messages; 'thought >> text' gives an answer its reasoning."""
    messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    for number, text in enumerate(texts):
        message = {"role": "assistant" if number % 2 else "user", "content": text.rpartition(" >> ")[2]}
        if " >> " in text:
            message["reasoning_content"] = text.rpartition(" >> ")[0]
        messages.append(message)
    return Conversation(name, "test", "general", messages, **more)
