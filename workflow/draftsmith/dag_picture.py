"""``python -m draftsmith.dag_picture dag.mmd dag.svg``: the rule graph as the picture that README.md shows.

Drawn without graphviz, from what ``snakemake --rulegraph mermaid-js`` prints; edges that a longer way implies are left out.
Colours follow the reader's light or dark mode.
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
  path { fill: none; stroke: #8c959f; stroke-width: 1.5; }
  marker path { fill: #8c959f; stroke: none; }
  text { font-family: system-ui, sans-serif; text-anchor: middle; fill: #1f2328; font-size: 14px; font-weight: 600; }
  .what { font-size: 10px; font-weight: 400; fill: #59636e; }
  @media (prefers-color-scheme: dark) {
    rect { fill: #151b23; stroke: #656c76; }
    path { stroke: #656c76; }
    marker path { fill: #656c76; }
    text { fill: #f0f6fc; }
    .what { fill: #9198a1; }
  }
"""
# Width of a character of the second line, in pixels; a longer line is squeezed into its box.
_CHARACTER = 5.2


def svg(graph: dag.Graph) -> str:
    """The picture of ``graph``."""
    what = {name: stage.what for name, stage in stages.BY_NAME.items()} | {"report": "one page about the whole run"}
    drawing = dag.draw(graph, lambda name: dag.Box(what.get(name, ""), None, "", True))
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
        room = drawing.box_width - 12
        squeezed = f' textLength="{room:g}" lengthAdjust="spacingAndGlyphs"'
        fit = squeezed if len(box.box.below) * _CHARACTER > room else ""
        parts += [
            f'<rect x="{box.x:g}" y="{box.y:g}" width="{drawing.box_width:g}" height="{drawing.box_height:g}" rx="6"/>',
            f'<text x="{middle:g}" y="{box.y + 20:g}">{escape(box.name)}</text>',
            f'<text class="what" x="{middle:g}" y="{box.y + 36:g}"{fit}>{escape(box.box.below)}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


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
