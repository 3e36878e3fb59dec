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
from dataclasses import dataclass
from functools import cache

from draftsmith.chat import template_tree

MARK = f"\ue000{secrets.token_hex(8)}\ue001"
"""Stands in front of each message in a rendering of the marked template; drawn anew by each process, so that no text has it."""


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
            body = template_tree.parse(template)
        except TemplateSyntaxError:
            return None
        loops = [place for place, node in enumerate(body) if isinstance(node, nodes.For)]
        if len(loops) != 1:
            return None
        before, loop, after = body[: loops[0]], body[loops[0]], body[loops[0] + 1 :]
        tags = list(re.finditer(r"\{%[-+]?\s*for\s+\w+\s+in\s+(\w+)\s*([-+]?)%\}", template))
        tags = [tag for tag in tags if isinstance(loop.iter, nodes.Name) and tag[1] == loop.iter.name]
        closing = template_tree.closing(after)
        if closing is None or len(tags) != 1 or MARK in template or not template_tree.only_appends(before, loop, after):
            return None
        [tag] = tags
        # A block, as it takes white space behind it in the way that the loop's own tag did.
        mark = f"{{% if true %}}{MARK}{{% endif {tag[2]}%}}"
        marked = template[: tag.end()] + mark + template[tag.end() :]
        return cls(marked, closing, "tools" not in template_tree.names(after))

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
