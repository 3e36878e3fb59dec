"""What a page consists of. Sections are built of these, and the template knows nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from draftsmith.report.values import Shown

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Fact:
    """A figure with its name and, in ``note``, what exactly it is."""

    label: str
    value: Shown
    note: str = ""


@dataclass(frozen=True)
class Tile:
    """A headline figure; ``badge`` is a verdict beside it."""

    label: str
    value: Shown
    note: str
    badge: str = ""
    level: Level = "ok"


@dataclass(frozen=True)
class Bar:
    """A cell with a bar of ``part`` (0 to 1) of the column behind its text."""

    value: Shown
    part: float


@dataclass(frozen=True)
class Link:
    """A cell that leads to another place of the page."""

    text: str
    target: str


Cell = str | Shown | Bar | Link


@dataclass(frozen=True)
class Table:
    """Rows of cells; the columns from ``numeric`` on are aligned to the right. The first cell of a row is its "
    "heading."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    numeric: int = 1
    note: str = ""
    total: Sequence[Cell] | None = None

    @property
    def reasons(self) -> list[str]:
        """Why cells are missing, each reason once, in the order of the cells."""
        cells = [
            cell.value if isinstance(cell, Bar) else cell for row in [*self.rows, self.total or ()] for cell in row
        ]
        return list(dict.fromkeys(cell.why for cell in cells if isinstance(cell, Shown) and cell.why))


@dataclass(frozen=True)
class Chart:
    """A figure as plotly's JSON, with its numbers as a table; without a figure, ``why`` says what is missing."""

    id: str
    title: str
    note: str = ""
    figure: dict[str, Any] | None = None
    table: Table | None = None
    why: str = ""


@dataclass(frozen=True)
class Detail:
    """Text to unfold: a traceback, a config file, a list of ids."""

    summary: str
    body: str
    note: str = ""


@dataclass(frozen=True)
class Token:
    """A token of a row: its place and id, and its text in pieces, of which each has a sign for what cannot be seen."""

    place: int
    id: Any
    special: bool
    marks: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Run:
    """Tokens in a row that are all supervised or all not, or, with ``gap``, some that are left out."""

    start: int
    supervised: bool
    tokens: Sequence[Token]
    gap: str = ""


@dataclass(frozen=True)
class Sample:
    """A row, token by token; ``title`` says why it is shown, ``spans`` tells the supervised ones in words."""

    id: str
    title: str
    summary: str
    facts: Sequence[Fact]
    runs: Sequence[Run]
    spans: Sequence[str]


@dataclass(frozen=True)
class Notice:
    """Something that the reader must not miss."""

    level: Level
    text: str
    points: Sequence[str] = ()


@dataclass
class Section:
    """A part of the page; ``missing`` says why there is nothing in it."""

    id: str
    title: str
    lead: str = ""
    missing: str = ""
    notices: list[Notice] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    details: list[Detail] = field(default_factory=list)
