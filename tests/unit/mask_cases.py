"""Conversations of every kind, and what of each is supervised with each kind of template, written out by hand."""
# ruff: noqa: RUF001 (DeepSeek writes its marks with this bar)

from __future__ import annotations

from typing import Any

from chats import talk
from draftsmith.conversations import Conversation

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


def _with_roles(*given: tuple[str, str], **more: Any) -> Conversation:
    return Conversation("c", "test", "general", [{"role": role, "content": text} for role, text in given], **more)


def _cut() -> Conversation:
    conversation = talk("hi", "The answer is", "go on", "More.")
    conversation.messages[1]["truncated"] = True
    return conversation


def _tools() -> Conversation:
    conversation = _with_roles(("user", "q"), ("assistant", ""), ("tool", "3"), ("assistant", "It is 3."), tools=TOOLS)
    call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    conversation.messages[1]["tool_calls"] = [call]
    conversation.messages[2]["tool_call_id"] = "functions.f:0"
    return conversation


CONVERSATIONS = {
    "one turn": talk("hi", "The answer"),
    "many turns": talk("hi", "The answer", "what?", "It is 3.", "and?", "Yes."),
    "system": talk("hi", "The answer", "what?", "It is 3.", system="be brief"),
    "tools": _tools(),
    "reasoning kept": talk("hi", "t1 >> A1", "more", "t2 >> A2"),
    "reasoning stripped": talk("hi", "t1 >> A1", "more", "t2 >> A2"),
    "empty answer": talk("hi", ""),
    "cut answer": _cut(),
    "two assistants": _with_roles(("user", "hi"), ("assistant", "A"), ("assistant", "B")),
    "assistant first": _with_roles(("assistant", "Hello"), ("user", "hi"), ("assistant", "A")),
}

# Of each kind: for each conversation the supervised texts of each row, or the reason why there is none.
Rows = list[list[str]] | str
_EMPTY: dict[str, Rows] = {"empty answer": "empty_answer"}
EXPECTED: dict[str, dict[str, Rows]] = {
    "chatml": _EMPTY | {
        "one turn": [["The answer<|im_end|>"]],
        "many turns": [["The answer<|im_end|>", "It is 3.<|im_end|>", "Yes.<|im_end|>"]],
        "system": [["The answer<|im_end|>", "It is 3.<|im_end|>"]],
        "tools": [['<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>', "It is 3.<|im_end|>"]],
        "reasoning kept": [["<think>\nt1\n</think>\n\nA1<|im_end|>", "<think>\nt2\n</think>\n\nA2<|im_end|>"]],
        "reasoning stripped": [["<think>\nt1\n</think>\n\nA1<|im_end|>"], ["<think>\nt2\n</think>\n\nA2<|im_end|>"]],
        "cut answer": [["The answer is", "More.<|im_end|>"]],
        "two assistants": [["A<|im_end|>", "B<|im_end|>"]],
        "assistant first": [["A<|im_end|>"]],
    },
    "llama3": _EMPTY | {
        "one turn": [["The answer<|eot_id|>"]],
        "many turns": [["The answer<|eot_id|>", "It is 3.<|eot_id|>", "Yes.<|eot_id|>"]],
        "system": [["The answer<|eot_id|>", "It is 3.<|eot_id|>"]],
        "tools": [['{"name": "f", "parameters": {"a": 1}}<|eot_id|>', "It is 3.<|eot_id|>"]],
        # It knows no reasoning, and its prompt asks for none.
        "reasoning kept": [["A1<|eot_id|>", "A2<|eot_id|>"]],
        "reasoning stripped": [["A1<|eot_id|>", "A2<|eot_id|>"]],
        "cut answer": [["The answer is", "More.<|eot_id|>"]],
        "two assistants": [["A<|eot_id|>", "B<|eot_id|>"]],
        "assistant first": [["A<|eot_id|>"]],
    },
    "gemma": _EMPTY | {
        "one turn": [["The answer<end_of_turn>"]],
        "many turns": [["The answer<end_of_turn>", "It is 3.<end_of_turn>", "Yes.<end_of_turn>"]],
        "system": [["The answer<end_of_turn>", "It is 3.<end_of_turn>"]],
        "tools": "template_refused",
        "reasoning kept": [["A1<end_of_turn>", "A2<end_of_turn>"]],
        "reasoning stripped": [["A1<end_of_turn>", "A2<end_of_turn>"]],
        "cut answer": [["The answer is", "More.<end_of_turn>"]],
        "two assistants": "template_refused",
        "assistant first": "template_refused",
    },
    # The prompt ends with <think> or </think>, which is then none of the answer.
    "deepseek": _EMPTY | {
        "one turn": [["The answer<｜end▁of▁sentence｜>"]],
        "many turns": [["The answer<｜end▁of▁sentence｜>", "It is 3.<｜end▁of▁sentence｜>", "Yes.<｜end▁of▁sentence｜>"]],
        "system": [["The answer<｜end▁of▁sentence｜>", "It is 3.<｜end▁of▁sentence｜>"]],
        "tools": [[
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>',
            "It is 3.<｜end▁of▁sentence｜>",
        ]],
        "reasoning kept": [["t1</think>A1<｜end▁of▁sentence｜>", "t2</think>A2<｜end▁of▁sentence｜>"]],
        "reasoning stripped": [["t1</think>A1<｜end▁of▁sentence｜>"], ["t2</think>A2<｜end▁of▁sentence｜>"]],
        "cut answer": [["The answer is", "More.<｜end▁of▁sentence｜>"]],
        "two assistants": [["A<｜end▁of▁sentence｜>", "B<｜end▁of▁sentence｜>"]],
        "assistant first": [["A<｜end▁of▁sentence｜>"]],
    },
    "kimi": _EMPTY | {
        "one turn": [["The answer<|im_end|>"]],
        "many turns": [["The answer<|im_end|>", "It is 3.<|im_end|>", "Yes.<|im_end|>"]],
        "system": [["The answer<|im_end|>", "It is 3.<|im_end|>"]],
        "tools": [[
            '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}'
            "<|tool_call_end|><|tool_calls_section_end|><|im_end|>",
            "It is 3.<|im_end|>",
        ]],
        "reasoning kept": [["t1</think>A1<|im_end|>", "t2</think>A2<|im_end|>"]],
        "reasoning stripped": [["t1</think>A1<|im_end|>"], ["t2</think>A2<|im_end|>"]],
        "cut answer": [["The answer is", "More.<|im_end|>"]],
        "two assistants": [["A<|im_end|>", "B<|im_end|>"]],
        "assistant first": [["A<|im_end|>"]],
    },
    # The model stops with the mark of the next role: the user's, or the tool's behind a call.
    "glm": _EMPTY | {
        "one turn": [["\n<think></think>\nThe answer<|user|>"]],
        "many turns": [[
            "\n<think></think>\nThe answer<|user|>", "\n<think></think>\nIt is 3.<|user|>", "\n<think></think>\nYes.<|user|>",
        ]],
        "system": [["\n<think></think>\nThe answer<|user|>", "\n<think></think>\nIt is 3.<|user|>"]],
        "tools": [[
            "\n<think></think>\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call><|observation|>",
            "\n<think></think>\nIt is 3.<|user|>",
        ]],
        "reasoning kept": [["\n<think>t1</think>\nA1<|user|>", "\n<think>t2</think>\nA2<|user|>"]],
        "reasoning stripped": [["\n<think>t1</think>\nA1<|user|>"], ["\n<think>t2</think>\nA2<|user|>"]],
        "cut answer": [["\n<think></think>\nThe answer is", "\n<think></think>\nMore.<|user|>"]],
        # Behind the first stands <|assistant|>, which no generation ends with.
        "two assistants": [["\n<think></think>\nA<|user|>"], ["\n<think></think>\nB<|user|>"]],
        "assistant first": [["\n<think></think>\nA<|user|>"]],
    },
    "mistral": _EMPTY | {
        "one turn": [["The answer</s>"]],
        "many turns": [["The answer</s>", "It is 3.</s>", "Yes.</s>"]],
        "system": [["The answer</s>", "It is 3.</s>"]],
        "tools": [['[TOOL_CALLS]f[ARGS]{"a": 1}</s>', "It is 3.</s>"]],
        "reasoning kept": [["[THINK]t1[/THINK]A1</s>", "[THINK]t2[/THINK]A2</s>"]],
        "reasoning stripped": [["[THINK]t1[/THINK]A1</s>"], ["[THINK]t2[/THINK]A2</s>"]],
        "cut answer": [["The answer is", "More.</s>"]],
        "two assistants": "template_refused",
        "assistant first": "template_refused",
    },
    # <|return|> is <|end|> in history, so that each answer has a row; behind a call both are <|call|>.
    "harmony": _EMPTY | {
        "one turn": [["<|channel|>final<|message|>The answer<|return|>"]],
        "many turns": [
            ["<|channel|>final<|message|>The answer<|return|>"], ["<|channel|>final<|message|>It is 3.<|return|>"],
            ["<|channel|>final<|message|>Yes.<|return|>"],
        ],
        "system": [["<|channel|>final<|message|>The answer<|return|>"], ["<|channel|>final<|message|>It is 3.<|return|>"]],
        "tools": [[
            ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>', "<|channel|>final<|message|>It is 3.<|return|>",
        ]],
        "reasoning kept": [
            ["<|channel|>analysis<|message|>t1<|end|><|start|>assistant<|channel|>final<|message|>A1<|return|>"],
            ["<|channel|>analysis<|message|>t2<|end|><|start|>assistant<|channel|>final<|message|>A2<|return|>"],
        ],
        "reasoning stripped": [
            ["<|channel|>analysis<|message|>t1<|end|><|start|>assistant<|channel|>final<|message|>A1<|return|>"],
            ["<|channel|>analysis<|message|>t2<|end|><|start|>assistant<|channel|>final<|message|>A2<|return|>"],
        ],
        "cut answer": [["<|channel|>final<|message|>The answer is"], ["<|channel|>final<|message|>More.<|return|>"]],
        "two assistants": [["<|channel|>final<|message|>A<|return|>"], ["<|channel|>final<|message|>B<|return|>"]],
        "assistant first": [["<|channel|>final<|message|>A<|return|>"]],
    },
}  # fmt: skip
