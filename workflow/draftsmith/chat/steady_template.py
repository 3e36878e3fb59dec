"""Chat templates of which it can be shown that they only ever append: one rendering then tells all the earlier ones.

Finding answers needs the rendering of a conversation up to and with each answer, and of each prompt: for n answers 2n
renderings, which grow with n squared. For a template that goes through the messages once, in order, and sees of the
others nothing but the first, each of them is a beginning of the whole by construction; a mark in front of each message
tells where it ends. What a template is allowed for that is checked on its syntax tree:

- one loop over the messages (or over all but the first), at the top level, without a condition; what stands behind it is
  text or depends on `add_generation_prompt`, and on nothing that the loop could have changed;
- no other look at the messages than at the first one, and no look ahead (`loop.last`, `loop.length`, `loop.nextitem` …);
- `add_generation_prompt` is read behind the loop only.

Most templates of the ChatML and Gemma kinds are of this sort. Those that rewrite history never are.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

MARK = f"\ue000{secrets.token_hex(8)}\ue001"
"""Stands in front of each message in a rendering of the marked template; drawn anew by each process, so that no text has it."""

# What a loop knows without knowing what comes.
_LOOKS_BACK = {"changed", "cycle", "depth", "depth0", "first", "index", "index0", "previtem"}
_PROMPT = "add_generation_prompt"


@dataclass(frozen=True)
class SteadyTemplate:
    """``marked`` is the template's source with the marks; ``closing`` is what it writes behind the last message.

    ``fixed_prompt`` tells that the header of an answer to come is the same for all conversations.
    """

    marked: str
    closing: str
    fixed_prompt: bool

    @classmethod
    @cache
    def of(cls, template: str) -> SteadyTemplate | None:
        """The template, if it can be shown to be of this sort."""
        from jinja2 import TemplateSyntaxError, nodes

        try:
            body = [node for node in _environment().parse(template).body if not _is_default_of_prompt(node)]
        except TemplateSyntaxError:
            return None
        loops = [place for place, node in enumerate(body) if isinstance(node, nodes.For)]
        if len(loops) != 1:
            return None
        before, loop, after = body[: loops[0]], body[loops[0]], body[loops[0] + 1 :]
        tags = list(re.finditer(r"\{%[-+]?\s*for\s+\w+\s+in\s+(\w+)\s*([-+]?)%\}", template))
        tags = [tag for tag in tags if isinstance(loop.iter, nodes.Name) and tag[1] == loop.iter.name]
        closing = _closing(after)
        names = _names(after)
        if (
            not _over_messages(loop, body)
            or any(True for _ in _looks_ahead(loop.body, False))
            or any(name == _PROMPT for name in _names([*before, loop]))
            or names & (_assigned(body) | {"messages", "loop"})
            or closing is None
            or len(tags) != 1
            or MARK in template
            or any(True for node in body for _ in _with_self(node, *_not_followed()))
        ):
            return None
        [tag] = tags
        # A block, as it takes white space behind it in the way that the loop's own tag did.
        mark = f"{{% if true %}}{MARK}{{% endif {tag[2]}%}}"
        marked = template[: tag.end()] + mark + template[tag.end() :]
        return cls(marked, closing, "tools" not in names)

    def pieces(self, rendered: str, messages: int, least: int) -> list[str] | None:
        """What the rendering of ``messages`` by the marked template has before and with each message.

        The rendering of the first n messages, ``least`` or more, is the first n pieces and then :attr:`closing`. None if the
        marks are not where they are expected, as in a conversation that has them in its text.
        """
        head, *shown = rendered.split(MARK)
        if len(shown) == messages - 1 and least > 1:
            # The loop began with the second message, so that what is in front of it has been shown the first.
            head, shown = "", [head, *shown]
        if len(shown) != messages or not shown[-1].endswith(self.closing):
            return None
        shown[0] = head + shown[0]
        shown[-1] = shown[-1].removesuffix(self.closing)
        return shown


def _environment() -> Any:
    """An environment that parses what transformers' can."""
    from jinja2 import Environment, nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 (the base class has it so)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    return Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])


def _over_messages(loop: Any, body: list[Any]) -> bool:
    """Whether ``loop`` goes through all messages, or all but the first, and nothing else sees others than the first."""
    from jinja2 import nodes

    if not isinstance(loop.iter, nodes.Name) or loop.test or loop.else_ or loop.recursive:
        return False
    lists = {"messages"}
    allowed = [loop.iter]
    for node in _plain_assigns(body):
        value, target = node.node, node.target
        if isinstance(value, nodes.Getitem) and _is_from_second(value.arg):
            value = value.node
        if isinstance(value, nodes.Name) and value.name == "messages" and isinstance(target, nodes.Name):
            lists.add(target.name)
            allowed.append(value)
    if loop.iter.name not in lists or ("messages" in _assigned(body) and loop.iter.name != "messages"):
        return False
    for part in body:
        for node in _with_self(part, nodes.Getitem):
            first = isinstance(node.arg, nodes.Const) and node.arg.value == 0
            if first and isinstance(node.node, nodes.Name) and node.node.name == "messages":
                allowed.append(node.node)
        for node in _with_self(part, nodes.Assign, nodes.AssignBlock, nodes.For, nodes.NSRef):
            target = getattr(node, "target", None)
            others = [name for name in _with_self(target, nodes.Name) if name.name in lists] if target else []
            if others and not (isinstance(node, nodes.Assign) and _source_of(node) in map(id, allowed)):
                return False
    return all(
        any(name is one for one in allowed) for part in body for name in _with_self(part, nodes.Name)
        if name.name in lists and name.ctx == "load"
    )  # fmt: skip


def _plain_assigns(body: list[Any]) -> Iterator[Any]:
    """Assignments outside of loops and macros."""
    from jinja2 import nodes

    for node in body:
        if isinstance(node, nodes.Assign):
            yield node
        elif isinstance(node, nodes.If):
            yield from _plain_assigns([*node.body, *node.elif_, *node.else_])


def _source_of(assign: Any) -> int:
    value = assign.node
    return id(getattr(value, "node", value))


def _is_from_second(node: Any) -> bool:
    from jinja2 import nodes

    return isinstance(node, nodes.Slice) and not node.stop and not node.step and getattr(node.start, "value", None) == 1


def _looks_ahead(body: list[Any], inner: bool) -> Iterator[Any]:
    """Uses of ``loop`` in the body of the loop over the messages that may know what comes; ``inner`` ones are their own."""
    from jinja2 import nodes

    for node in body:
        if isinstance(node, nodes.Name) and node.name == "loop" and not inner:
            yield node
        elif isinstance(node, nodes.Getattr | nodes.Getitem) and getattr(node.node, "name", None) == "loop":
            name = node.attr if isinstance(node, nodes.Getattr) else getattr(node.arg, "value", None)
            if not inner and name not in _LOOKS_BACK:
                yield node
        elif isinstance(node, nodes.For):
            yield from _looks_ahead([node.iter, *([node.test] if node.test else []), *node.else_], inner)
            yield from _looks_ahead(node.body, True)
        else:
            yield from _looks_ahead(list(node.iter_child_nodes()), inner)


def _closing(after: list[Any]) -> str | None:
    """What the nodes behind the loop write if no answer is to come; None where that cannot be told."""
    from jinja2 import nodes

    written = ""
    for node in after:
        texts = [part.data for part in getattr(node, "nodes", []) if isinstance(part, nodes.TemplateData)]
        if isinstance(node, nodes.Output) and len(texts) == len(node.nodes):
            written += "".join(texts)
        elif not isinstance(node, nodes.If) or not _asks_for_prompt(node.test) or node.elif_ or node.else_:
            return None
    return written


def _is_default_of_prompt(node: Any) -> bool:
    """Whether it gives `add_generation_prompt` a value where it has none, which never is so."""
    from jinja2 import nodes

    if not isinstance(node, nodes.If) or not isinstance(node.test, nodes.Not) or node.elif_ or node.else_:
        return False
    asked = node.test.node
    return isinstance(asked, nodes.Test) and asked.name == "defined" and getattr(asked.node, "name", None) == _PROMPT


def _not_followed() -> tuple[Any, ...]:
    """Nodes whose effects are not followed here."""
    from jinja2 import nodes

    return (nodes.Block, nodes.Break, nodes.Extends, nodes.Import, nodes.FromImport, nodes.Include)


def _asks_for_prompt(test: Any) -> bool:
    from jinja2 import nodes

    return (isinstance(test, nodes.Name) and test.name == _PROMPT) or (
        isinstance(test, nodes.And) and (_asks_for_prompt(test.left) or _asks_for_prompt(test.right))
    )


def _names(parts: list[Any]) -> set[str]:
    from jinja2 import nodes

    return {name.name for part in parts for name in _with_self(part, nodes.Name)}


def _assigned(body: list[Any]) -> set[str]:
    """Names that the template itself gives a value."""
    from jinja2 import nodes

    stored = {name.name for part in body for name in _with_self(part, nodes.Name) if name.ctx != "load"}
    return stored | {macro.name for part in body for macro in _with_self(part, nodes.Macro)}


def _with_self(node: Any, *kinds: Any) -> Iterator[Any]:
    if isinstance(node, kinds):
        yield node
    yield from node.find_all(kinds)
