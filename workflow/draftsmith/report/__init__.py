"""report: everything that the run measured, on one page that needs nothing but a browser."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jinja2
from plotly.offline import get_plotlyjs

from draftsmith import __version__
from draftsmith.config import Config
from draftsmith.files import atomic_path
from draftsmith.log import log
from draftsmith.report import dag, model, stages
from draftsmith.report.data import REPORTS, Gathered, gather
from draftsmith.report.sections import every, of_data, overview
from draftsmith.report.sections.workflow import box


def run(config: Config, *, results: Path, benchmarks: Path, rulegraph: Path | None, page: Path) -> None:
    """Draw the JSON files of the stages below ``results`` and Snakemake's files below ``benchmarks`` as ``page``.

    ``rulegraph`` is what ``snakemake --rulegraph mermaid-js`` printed; None: the graph as the rules are written. A
    figure that is missing is shown as a dash with the reason. Raises :class:`DraftsmithError` when no stage has left a
    file, or when ``rulegraph`` holds no graph.
    """
    gathered = gather(config, results, benchmarks)
    graph = dag.read_mermaid(rulegraph) if rulegraph else stages.graph(regenerated="merge_answers" in gathered.reports)
    _write(
        page,
        gathered,
        title=config.report.title,
        tiles=overview.tiles(gathered),
        notices=overview.notices(gathered),
        drawing=dag.draw(graph, lambda name: box(gathered, name)),
        sections=every(gathered, graph),
    )
    log(
        f"report: {page}, {page.stat().st_size / 1e6:.1f} MB, of {len(gathered.reports)} stages and "
        f"{gathered.benchmarks.count()} measured jobs"
    )


def draw_data(config: Config, given: Mapping[str, dict[str, Any]], page: Path) -> None:
    """Draw what is known before anything is extracted as ``page``: ``given`` are figures by stage, look's among them."""
    gathered = Gathered(config, Path())
    gathered.reports = dict(given)
    gathered.absent = {stage: f"no file of the stage {stage} was given" for stage in REPORTS if stage not in given}
    _write(
        page,
        gathered,
        title=f"{config.name}: the data",
        tiles=overview.data_tiles(gathered),
        notices=[],
        drawing=None,
        sections=of_data(gathered),
    )


def _write(page: Path, gathered: Gathered, **parts: Any) -> None:
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
    content = templates.get_template("page.html").render(
        name=gathered.config.name,
        source=gathered.of("get_target").get("source"),
        version=__version__,
        date=time.strftime("%Y-%m-%d %H:%M %z"),
        plotly=get_plotlyjs(),
        **parts,
    )
    with atomic_path(page) as temporary:
        # A token may end in half of a surrogate pair, which has no UTF-8 form.
        temporary.write_text(content, encoding="utf-8", errors="replace")


def _is(kind: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, kind)
