"""Charts as plotly's JSON. Colours are CSS variables, which the page's script puts in, so that both themes are served.

plotly.py checks every attribute here; nothing is drawn before the page is open.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

Number = float | int | None
Points = Sequence[tuple[float, Number]]

SERIES = ("var(--series-1)", "var(--series-2)", "var(--series-3)", "var(--series-4)")
_STEPS = 7
_HEIGHT = 300
# Characters of a label.
_LABEL = 32
# Ticks of an axis in per cent, with as many decimals as they need: of a fixed number, two ticks of a small range read alike.
_PER_CENT = "~%"


def ordered(count: int) -> list[str]:
    """Colours of ``count`` ordered curves, from strong to pale, as far apart as there are."""
    return [f"var(--step-{round(place * (_STEPS - 1) / max(count - 1, 1)) + 1})" for place in range(count)]


def lines(
    curves: Mapping[str, Points],
    *,
    x: str,
    y: str,
    percent: bool = False,
    colours: Sequence[str] = SERIES,
    dashes: Sequence[str] = (),
    from_zero: bool = False,
    logarithmic: bool = False,
    measured: bool = False,
    mark: tuple[float, float, str] | None = None,
) -> dict[str, Any]:
    """Curves over a common x axis; ``mark`` is a point to be named. Points without a value are left out.

    ``measured``: the axis has ticks where there are points and nowhere else, as between whole numbers there is nothing.
    """
    traces = []
    for place, (name, points) in enumerate(curves.items()):
        there = [(at, value) for at, value in points if value is not None]
        traces.append(
            go.Scatter(
                x=[at for at, _ in there],
                y=[value for _, value in there],
                name=name,
                # A curve of many points needs no marks; one of a single point cannot be seen without.
                mode="lines" if len(there) > 40 else "lines+markers",
                marker={"size": 5},
                line={"color": colours[place % len(colours)], "width": 2, "dash": dashes[place] if dashes else "solid"},
                hovertemplate="%{y:.1%}" if percent else "%{y:.4~g}",
            )
        )
    figure = _figure(traces, legend=len(traces) > 1)
    figure.update_layout(hovermode="x unified")
    figure.update_xaxes(title=x, hoverformat=",~r")
    if measured:
        figure.update_xaxes(tickvals=sorted({at for points in curves.values() for at, _ in points}))
    if logarithmic:
        ticks: list[float] = []
        for at in sorted({at for points in curves.values() for at, _ in points}):
            # Labels that are nearer than this would run into one another.
            if not ticks or at > 1.3 * ticks[-1]:
                ticks.append(at)
        figure.update_xaxes(type="log", tickvals=ticks, ticktext=[f"{tick:,}" for tick in ticks])
    figure.update_yaxes(
        title=y, tickformat=_PER_CENT if percent else None, rangemode="tozero" if from_zero else "normal"
    )
    if percent and len({value for points in curves.values() for _, value in points if value is not None}) == 1:
        # Around a constant, plotly would show shares of more than everything.
        figure.update_yaxes(range=[0, 1.05])
    if mark is not None:
        at, value, label = mark
        figure.add_trace(
            go.Scatter(
                x=[at],
                y=[value],
                text=[label],
                mode="markers+text",
                textposition="top left",
                showlegend=False,
                cliponaxis=False,
                marker={"size": 11, "color": SERIES[1]},
                textfont={"color": "var(--ink)"},
                hoverinfo="skip",
            )
        )
    return _json(figure)


def stacked(groups: Sequence[str], parts: Mapping[str, Sequence[Number]], *, x: str) -> dict[str, Any]:
    """Horizontal bars, one a group, each the sum of its parts."""
    traces = [
        go.Bar(
            y=_plain(groups),
            x=[value or 0 for value in values],
            name=name,
            orientation="h",
            marker={"color": SERIES[place % len(SERIES)]},
            hovertemplate="%{x:,}",
        )
        for place, (name, values) in enumerate(parts.items())
    ]
    figure = _figure(traces, legend=True, height=_bar_height(len(groups)))
    figure.update_layout(barmode="stack", hovermode="y unified")
    figure.update_xaxes(title=x)
    figure.update_yaxes(autorange="reversed", type="category", automargin=True)
    return _json(figure)


def compared(groups: Sequence[str], series: Mapping[str, Sequence[Number]], *, x: str) -> dict[str, Any]:
    """Horizontal bars of shares, for each group one of each series."""
    traces = [
        go.Bar(
            y=_plain(groups),
            x=list(values),
            name=name,
            orientation="h",
            marker={"color": SERIES[place % len(SERIES)]},
            text=["" if value is None else format(value, ".1%") for value in values],
            textposition="outside",
            cliponaxis=False,
            textfont={"color": "var(--ink)"},
            hovertemplate="%{x:.1%}",
        )
        for place, (name, values) in enumerate(series.items())
    ]
    figure = _figure(traces, legend=len(traces) > 1, height=_bar_height(len(groups) * max(len(traces), 1)))
    figure.update_layout(barmode="group", bargap=0.3, hovermode="y unified")
    longest = max([value for values in series.values() for value in values if value is not None], default=0)
    figure.update_xaxes(title=x, tickformat=_PER_CENT, range=[0, longest * 1.15 or 1])
    figure.update_yaxes(autorange="reversed", type="category", automargin=True)
    return _json(figure)


def bars(
    names: Sequence[str],
    values: Sequence[Number],
    *,
    x: str,
    digits: str = ".2f",
    notes: Sequence[str] | None = None,
    strong: str | None = None,
    line: tuple[float, str] | None = None,
    start: float = 0,
) -> dict[str, Any]:
    """Horizontal bars, one of them ``strong``; ``line`` is a value to compare with. Bars begin at ``start``.

    A length that begins at 1 by definition is best compared from there.
    """
    bar = go.Bar(
        y=_plain(names),
        x=[None if value is None else value - start for value in values],
        base=start,
        orientation="h",
        marker={"color": [SERIES[0] if name == strong or strong is None else "var(--series-1-soft)" for name in names]},
        text=["" if value is None else format(value, digits) for value in values],
        textposition="outside",
        cliponaxis=False,
        textfont={"color": "var(--ink)"},
        customdata=list(notes) if notes else None,
        hovertemplate="%{y}: %{text}" + ("<br>%{customdata}" if notes else "") + "<extra></extra>",
    )
    figure = _figure([bar], legend=False, height=_bar_height(len(names)))
    longest = max([start, *(value for value in [*values, line[0] if line else None] if value is not None)])
    figure.update_xaxes(title=x, range=[start, start + (longest - start) * 1.15 or 1])
    figure.update_yaxes(autorange="reversed", type="category", automargin=True)
    if line is not None:
        figure.add_vline(
            x=line[0],
            line={"color": "var(--series-2)", "width": 2, "dash": "dash"},
            annotation_text=line[1],
            annotation_position="top",
            annotation_font={"color": "var(--ink)", "size": 12},
        )
    return _json(figure)


def columns(
    groups: Sequence[str], series: Mapping[str, Sequence[Number]], *, x: str, y: str, percent: bool = False
) -> dict[str, Any]:
    """Vertical bars side by side, for each group one of each series."""
    traces = [
        go.Bar(
            x=_plain(groups),
            y=list(values),
            name=name,
            marker={"color": SERIES[place % len(SERIES)]},
            text=["" if value is None else format(value, ".1%" if percent else ",") for value in values],
            textposition="outside",
            cliponaxis=False,
            textfont={"color": "var(--ink)"},
            hovertemplate="%{x}: %{text}<extra>" + ("%{fullData.name}" if len(series) > 1 else "") + "</extra>",
        )
        for place, (name, values) in enumerate(series.items())
    ]
    figure = _figure(traces, legend=len(traces) > 1)
    figure.update_layout(
        barmode="group", bargap=0.15 if len(groups) > 8 else 0.4, uniformtext={"minsize": 9, "mode": "hide"}
    )
    figure.update_xaxes(title=x, type="category")
    highest = max([value for values in series.values() for value in values if value is not None], default=0)
    figure.update_yaxes(title=y, tickformat=_PER_CENT if percent else None, range=[0, highest * 1.12 or 1])
    return _json(figure)


def _plain(names: Sequence[str]) -> list[str]:
    """Names from data as they are, as plotly takes some tags in labels for markup, but no longer than a chart can bear."""
    short: list[str] = []
    for name in names:
        label = name if len(name) <= _LABEL else f"{name[: _LABEL - 1]}…"
        # Of one name there would be one bar.
        short.append(label if label not in short else f"{label} ({len(short) + 1})")
    return [html.escape(label, quote=False) for label in short]


def _bar_height(bars: int) -> int:
    return max(170, 96 + 34 * bars)


def _figure(traces: list[Any], *, legend: bool, height: int = _HEIGHT) -> go.Figure:
    figure = go.Figure(traces)
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 56, "r": 24, "t": 28 if legend else 24, "b": 48},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": "var(--muted)", "family": "system-ui, sans-serif", "size": 12},
        hoverlabel={"bgcolor": "var(--surface)", "bordercolor": "var(--line)", "font": {"color": "var(--ink)"}},
        showlegend=legend,
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        dragmode=False,
    )
    axes = {
        "gridcolor": "var(--line)",
        "linecolor": "var(--line)",
        "zeroline": False,
        "title_standoff": 10,
        "automargin": True,
    }
    figure.update_xaxes(**axes)
    figure.update_yaxes(**axes)
    return figure


def _json(figure: go.Figure) -> dict[str, Any]:
    return dict(json.loads(str(figure.to_json())))
