"""``python -m draftsmith.dag_picture dag.mmd dag.svg``: the rule graph as the picture that README.md shows.

Drawn without graphviz, from what ``snakemake --rulegraph mermaid-js`` prints for a config with all rules; the boxes of
optional ones are dashed. Edges that a longer way implies are left out. Colours follow the reader's light or dark mode.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

from draftsmith.errors import DraftsmithError
from draftsmith.files import atomic_path
from draftsmith.log import log
from draftsmith.report import dag, stages

_STYLE = """
  rect { fill: #f6f8fa; stroke: #8c959f; }
  .optional { stroke-dasharray: 5 4; }
  path { fill: none; stroke: #8c959f; stroke-width: 1.5; }
  marker path { fill: #8c959f; stroke: none; }
  text { font-family: system-ui, sans-serif; text-anchor: middle; fill: #1f2328; font-size: 14px; font-weight: 600; }
  .what { font-size: 11px; font-weight: 400; fill: #59636e; }
  @media (prefers-color-scheme: dark) {
    rect { fill: #151b23; stroke: #656c76; }
    path { stroke: #656c76; }
    marker path { fill: #656c76; }
    text { fill: #f0f6fc; }
    .what { fill: #9198a1; }
  }
"""
# Width of a character of the second line in a wide font, and room at both of its ends, in pixels.
_CHARACTER, _ROOM = 6.2, 16


def svg(graph: dag.Graph) -> str:
    """The picture of ``graph``."""
    what = {name: _what(name) for name in graph}
    width = round(max((len(line) for line in what.values()), default=0) * _CHARACTER + _ROOM)
    drawing = dag.draw(graph, lambda name: dag.Box(what[name], None, "", True), width)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {drawing.width:g} {drawing.height:g}" '
        f'width="{drawing.width:g}" height="{drawing.height:g}" role="img" aria-label="The rules of the workflow">',
        f"<style>{_STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="3" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z"/></marker></defs>',
    ]
    parts += [f'<path d="{path}" marker-end="url(#head)"/>' for path in drawing.paths]
    for box in drawing.boxes:
        middle = box.x + drawing.box_width / 2
        kind = ' class="optional"' if _optional(box.name) else ""
        size = f'width="{drawing.box_width:g}" height="{drawing.box_height:g}"'
        parts += [
            f'<rect{kind} x="{box.x:g}" y="{box.y:g}" {size} rx="6"/>',
            f'<text x="{middle:g}" y="{box.y + 20:g}">{escape(box.name)}</text>',
            f'<text class="what" x="{middle:g}" y="{box.y + 36:g}">{escape(box.box.below)}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def _optional(name: str) -> bool:
    return name in stages.BY_NAME and stages.BY_NAME[name].optional


def _what(name: str) -> str:
    """The second line of a rule's box; empty for a rule that no stage of the package is."""
    if name == "report":
        # On the page itself it is told otherwise.
        return "one page about the whole run"
    what = stages.BY_NAME[name].what if name in stages.BY_NAME else ""
    return f"optional: {what}" if _optional(name) else what


def main() -> None:
    """The command line."""
    try:
        source, target = (Path(argument) for argument in sys.argv[1:])
        text = svg(dag.read_mermaid(source))
        with atomic_path(target) as temporary:
            temporary.write_text(text)
    except DraftsmithError as error:
        log(f"error: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
