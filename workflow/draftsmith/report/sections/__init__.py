"""The page's sections, one module each: from the stages' figures to what is shown of them."""

from __future__ import annotations

from draftsmith.report.dag import Graph
from draftsmith.report.data import Gathered
from draftsmith.report.model import Section
from draftsmith.report.sections import data, evaluation, extraction, provenance, training, vocabulary, workflow


def every(gathered: Gathered, graph: Graph) -> list[Section]:
    """All sections below the headline, in the order of the page."""
    later = (data, extraction, vocabulary, training, evaluation, provenance)
    return [workflow.section(gathered, graph), *(part.section(gathered) for part in later)]
