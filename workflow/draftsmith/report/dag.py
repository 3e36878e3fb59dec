"""The workflow's graph: read from Snakemake's rule graph, laid out in rows, drawn as SVG."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from draftsmith.errors import DraftsmithError

Graph = Mapping[str, set[str]]

_NODE = re.compile(r"^\s*(\w+)\[\"?(.*?)\"?\]\s*$", re.MULTILINE)
_EDGE = re.compile(r"^\s*(\w+)\s*-->\s*(\w+)\s*$", re.MULTILINE)

_HEIGHT, _GAP, _LANE, _MARGIN = 46, 26, 26, 3
_LEAST_WIDTH, _CHARACTER = 190, 8


def read_mermaid(path: Path) -> dict[str, set[str]]:
    """The graph that ``snakemake --rulegraph mermaid-js`` prints, without the target rule ``all``.

    Raises :class:`DraftsmithError` when no rule is found in the file.
    """
    try:
        content = path.read_text()
    except OSError as error:
        raise DraftsmithError(
            f"{path}: cannot be read ({error.strerror}); make it with snakemake --rulegraph mermaid-js"
        ) from None
    names = {key: label.split("<br", 1)[0].split("\\n", 1)[0] for key, label in _NODE.findall(content)}
    if not names:
        raise DraftsmithError(f"{path}: no rule is found in it; make it with snakemake --rulegraph mermaid-js")
    graph: dict[str, set[str]] = {name: set() for name in names.values() if name != "all"}
    for before, after in _EDGE.findall(content):
        first, then = names.get(before), names.get(after)
        if first in graph and then in graph and first != then:
            graph[then].add(first)
    _depths(graph, str(path))
    return graph


def reduced(graph: Graph) -> dict[str, set[str]]:
    """The graph without the edges that a longer way implies."""
    above: dict[str, set[str]] = {}
    for node in sorted(graph, key=_depths(graph, "the graph").__getitem__):
        above[node] = {ancestor for need in graph[node] for ancestor in (need, *above[need])}
    return {
        node: {need for need in needs if not any(need in above[other] for other in needs)}
        for node, needs in graph.items()
    }


def _depths(graph: Graph, origin: str) -> dict[str, int]:
    """Longest way from a source to each node, in edges. Raises :class:`DraftsmithError` for a graph with a cycle."""
    depths: dict[str, int] = {}
    left = set(graph)
    while left:
        ready = {node for node in left if graph[node] <= depths.keys()}
        if not ready:
            raise DraftsmithError(
                f"{origin}: the rules {', '.join(sorted(left))} wait for one another; make the graph anew"
            )
        depths |= {node: max((depths[need] + 1 for need in graph[node]), default=0) for node in ready}
        left -= ready
    return depths


@dataclass(frozen=True)
class Box:
    """What is drawn for a rule: a line below its name, where a click leads, and whether it has results."""

    below: str
    target: str | None
    hint: str
    done: bool


@dataclass(frozen=True)
class PlacedBox:
    """A box with its top left corner, in pixels."""

    name: str
    x: float
    y: float
    box: Box


@dataclass(frozen=True)
class Drawing:
    """All that the template needs to write the SVG; lengths in pixels."""

    width: float
    height: float
    box_width: float
    box_height: float
    boxes: list[PlacedBox]
    paths: list[str]


def draw(graph: Graph, describe: Callable[[str], Box], least_width: float = _LEAST_WIDTH) -> Drawing:
    """Lay out ``graph`` from top to bottom, in boxes of one width: of ``least_width`` pixels, or as long names need.

    A rule stands below all that it waits for. In a row the rules with the longest way ahead stand left, so that the
    main line runs straight down; edges that pass a row have a lane right of its boxes.
    """
    edges = reduced(graph)
    depths = _depths(edges, "the graph")
    heights = _depths({node: {other for other in edges if node in edges[other]} for node in edges}, "the graph")
    rows = max(depths.values(), default=-1) + 1
    width = max([least_width, *(_CHARACTER * len(name) + 26 for name in edges)])
    passing = {
        (need, node): list(range(depths[need] + 1, depths[node])) for node in edges for need in sorted(edges[node])
    }
    x_of: dict[tuple[object, int], float] = {}
    widest = 0.0
    for row in range(rows):
        x = float(_MARGIN)
        for node in sorted((node for node in edges if depths[node] == row), key=lambda node: (-heights[node], node)):
            x_of[node, row] = x + width / 2
            x += width + _LANE / 2
        lanes = [edge for edge, between in passing.items() if row in between]
        for edge in sorted(lanes, key=lambda edge: x_of[edge if row - 1 > depths[edge[0]] else edge[0], row - 1]):
            x_of[edge, row] = x + _LANE / 2
            x += _LANE
        widest = max(widest, x)
    boxes = [
        PlacedBox(node, x_of[node, depths[node]] - width / 2, _top(depths[node]), describe(node)) for node in edges
    ]
    boxes.sort(key=lambda placed: (placed.y, placed.x))
    paths = [_path(edge, between, depths, x_of) for edge, between in passing.items()]
    return Drawing(widest + _MARGIN, _top(rows) - _GAP + _MARGIN, width, _HEIGHT, boxes, paths)


def _top(row: int) -> float:
    return _MARGIN + row * (_HEIGHT + _GAP)


def _path(
    edge: tuple[str, str], between: list[int], depths: Mapping[str, int], x_of: Mapping[tuple[object, int], float]
) -> str:
    """SVG path of an edge: a curve in each gap between rows, a straight line past each row."""
    first, last = edge
    x, y = x_of[first, depths[first]], _top(depths[first]) + _HEIGHT
    path = f"M{x:g} {y:g}"
    for row in [*between, depths[last]]:
        to, top = x_of[edge if row in between else last, row], _top(row)
        # The arrow's head needs the last pixels.
        end = top if row in between else top - 5
        middle = (y + end) / 2
        path += f"C{x:g} {middle:g} {to:g} {middle:g} {to:g} {end:g}"
        x, y = to, top
        if row in between:
            y = top + _HEIGHT
            path += f"V{y:g}"
    return path
