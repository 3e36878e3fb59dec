"""The syntax tree of a chat template: whether what it writes for a message can depend on what comes later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# What a loop knows without knowing what comes.
_LOOKS_BACK = {"changed", "cycle", "depth", "depth0", "first", "index", "index0", "previtem"}
_PROMPT = "add_generation_prompt"


def parse(template: str) -> list[Any]:
    """The nodes of ``template`` at its top level, as transformers' environment would parse it.

    Raises jinja2's TemplateSyntaxError.
    """
    from jinja2 import Environment, nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 (the base class has it so)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])
    return [node for node in environment.parse(template).body if not _is_default_of_prompt(node)]


def only_appends(before: list[Any], loop: Any, after: list[Any]) -> bool:
    """Whether a rendering of fewer messages is a beginning of that of more, for what stands before, in and behind the loop."""
    body = [*before, loop, *after]
    return (
        _over_messages(loop, body)
        and not any(True for _ in _looks_ahead(loop.body, False))
        and _PROMPT not in names([*before, loop])
        and not names(after) & (_assigned(body) | {"messages", "loop"})
        and not any(True for node in body for _ in _with_self(node, *_not_followed()))
    )


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


def closing(after: list[Any]) -> str | None:
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


def names(parts: list[Any]) -> set[str]:
    """Names that the nodes use or set."""
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
