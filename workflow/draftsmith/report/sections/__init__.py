"""The page's sections, one module each: from the stages' figures to what is shown of them."""

from __future__ import annotations

from draftsmith.report.dag import Graph
from draftsmith.report.data import Gathered
from draftsmith.report.model import Section
from draftsmith.report.sections import (
    data,
    evaluation,
    extraction,
    mix,
    provenance,
    rows,
    training,
    vocabulary,
    workflow,
)


def every(gathered: Gathered, graph: Graph) -> list[Section]:
    """All sections below the headline, in the order of the page."""
    later = (data, rows, mix, vocabulary, extraction, training, evaluation, provenance)
    return [workflow.section(gathered, graph), *(part.section(gathered) for part in later)]


def of_data(gathered: Gathered) -> list[Section]:
    """What can be told before anything is extracted."""
    return [part.section(gathered) for part in (data, rows, mix, vocabulary)]
