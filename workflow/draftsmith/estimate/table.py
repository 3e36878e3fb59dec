"""What ``draftsmith estimate`` shows to people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftsmith.estimate.model import Estimate, Figure, Time, total
from draftsmith.status.table import duration
from draftsmith.terminal import size

_STYLE = {"ok": "green", "warn": "yellow", "fail": "bold red", "unknown": "dim"}


def show(found: Estimate, console: Console) -> None:
    """Print all of it."""
    target, rows = found.target, found.rows
    console.print(
        Text(
            f"{found.name}: {target.source} ({target.model_type}, {target.num_layers} layers of width {target.hidden_size:,}, vocabulary "
            f"{target.vocab_size:,}), layers {target.layers} in {target.dtype} on {target.device}, TP {target.tp}; read from {target.read_from}"
        )
    )
    console.print(
        Text(
            f"rows ({rows.how}, {rows.explained}): {rows.rows:,} of {rows.tokens:,} tokens, the longest of {rows.longest:,}"
        )
    )
    _store(found, console)
    for name, figures in (
        ("disk besides the store", found.disk), ("extraction: each GPU", found.extraction_gpu), ("extraction: host", found.extraction_host),
        ("training: each GPU" if target.device == "cuda" else "training: tensors", found.training_gpu), ("training: host", found.training_host),
    ):  # fmt: skip
        if figures:
            _figures(name, figures, console)
    _times(found.times, console)
    checks = _table("against what there is", "check", " ", "")
    for check in found.checks:
        checks.add_row(check.name, Text(check.status, style=_STYLE[check.status]), check.detail)
    console.print(checks)
    for line in found.assumptions:
        console.print(Text(f"assumed: {line}", style="dim"))


def _table(title: str, *columns: str) -> Table:
    made = Table(title=f"\n{title}", box=None, pad_edge=False, title_justify="left", title_style="bold")
    for column in columns:
        made.add_column(column, overflow="fold", justify="right" if column in _NUMBERS else "left")
    return made


_NUMBERS = ("bytes a token", "files", "size", "time", "GPU hours", "at")


def _store(found: Estimate, console: Console) -> None:
    made = _table("store", "extract.storage", "bytes a token", "files", "size", "formula")
    for each in found.store:
        made.add_row(
            each.storage,
            f"{each.bytes_per_token:,}",
            f"{each.files:,}",
            size(each.bytes),
            each.formula,
            style="bold" if each.chosen else "",
        )
    console.print(made)


def _figures(name: str, figures: list[Figure], console: Console) -> None:
    made = _table(name, "", "size", "formula")
    for figure in figures:
        made.add_row(figure.name, size(figure.bytes), figure.formula)
    made.add_row("together", size(total(figures)), "", style="bold")
    console.print(made)


def _times(times: list[Time], console: Console) -> None:
    made = _table("time", "stage", "time", "GPU hours", "formula", "rate")
    for time in times:
        hours = "" if not time.gpu_seconds else f"{time.gpu_seconds / 3600:,.1f}"
        made.add_row(time.stage, duration(time.seconds) or "?", hours, time.formula, time.source)
    made.add_row("together", *together(times), "", style="bold")
    console.print(made)


def together(times: list[Time]) -> tuple[str, str, str]:
    """Time and GPU hours of all stages, and of which they are; no figure where only starts and checks are known."""
    lacking = [time.stage for time in times if time.seconds is None]
    without = f"; lacking: {', '.join(lacking)}" if lacking else ""
    if not any(time.seconds is not None and time.rate is not None for time in times):
        return "unknown", "", f"no stage's rate is known{without}"
    least = "at least " if lacking else ""
    seconds, gpu = (sum(getattr(time, name) or 0.0 for time in times) for name in ("seconds", "gpu_seconds"))
    return (
        f"{least}{duration(seconds)}",
        f"{least}{gpu / 3600:,.1f}" if gpu else "",
        f"one after the other{without}",
    )
