"""report: everything that the run measured, on one page that needs nothing but a browser."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import jinja2
from plotly.offline import get_plotlyjs

from draftsmith import __version__
from draftsmith.config import Config
from draftsmith.files import atomic_path
from draftsmith.log import log
from draftsmith.report import dag, model, stages
from draftsmith.report.data import Gathered, gather
from draftsmith.report.sections import every, overview
from draftsmith.report.sections.workflow import box


def run(config: Config, *, results: Path, benchmarks: Path, rulegraph: Path | None, page: Path) -> None:
    """Draw the JSON files of the stages below ``results`` and Snakemake's files below ``benchmarks`` as ``page``.

    ``rulegraph`` is what ``snakemake --rulegraph mermaid-js`` printed; None: the graph as the rules are written. A
    figure that is missing is shown as a dash with the reason. Raises :class:`DraftsmithError` when no stage has left a
    file, or when ``rulegraph`` holds no graph.
    """
    gathered = gather(config, results, benchmarks)
    graph = dag.read_mermaid(rulegraph) if rulegraph else stages.graph(regenerated="regenerate" in gathered.reports)
    with atomic_path(page) as temporary:
        temporary.write_text(_render(gathered, graph), encoding="utf-8")
    log(
        f"report: {page}, {page.stat().st_size / 1e6:.1f} MB, of {len(gathered.reports)} stages and "
        f"{gathered.benchmarks.count()} measured jobs"
    )


def _render(gathered: Gathered, graph: dag.Graph) -> str:
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("draftsmith.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.tests.update(
        {name: _is(kind) for name, kind in (("bar", model.Bar), ("link", model.Link), ("shown", model.Shown))}
    )
    return templates.get_template("page.html").render(
        title=gathered.config.report.title,
        name=gathered.config.name,
        source=gathered.of("get_target").get("source"),
        version=__version__,
        date=time.strftime("%Y-%m-%d %H:%M %z"),
        tiles=overview.tiles(gathered),
        notices=overview.notices(gathered),
        drawing=dag.draw(graph, lambda name: box(gathered, name)),
        sections=every(gathered, graph),
        plotly=get_plotlyjs(),
    )


def _is(kind: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, kind)
