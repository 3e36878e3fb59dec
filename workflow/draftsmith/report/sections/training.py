"""The course of the training."""

from __future__ import annotations

from typing import Any

from draftsmith.report import charts
from draftsmith.report.data import Gathered
from draftsmith.report.model import Cell, Chart, Fact, Section, Table
from draftsmith.report.values import (
    Shown,
    count,
    decimal,
    dig,
    duration,
    listing,
    number,
    numbers,
    precise,
    rate,
    share,
    shown,
)

_LACKING = "not in train/train.json"
_UNVALIDATED = "no validation was recorded: there are no validation rows"
_TABLE_ROWS = 40

Points = list[tuple[float, float | int | None]]


def section(gathered: Gathered) -> Section:
    """Losses, accuracies, simulated acceptance length and speed."""
    made = Section(
        "training",
        "Training",
        "The draft learns the target's own next-token distribution from the stored states. In the training-time "
        "test, each step runs on the draft's own output of the step before.",
    )
    report = gathered.of("train_draft")
    if "train_draft" in gathered.absent:
        made.missing = gathered.absent["train_draft"]
        return made
    history = [entry for entry in listing(report, "history") if number(entry, "step") is not None]
    made.facts = _facts(report)
    made.charts = [_loss(history), _simulated(history), _accuracy(history), _speed(history)]
    steps = numbers(report, "accuracy")
    if steps:
        made.tables.append(_steps(report))
    return made


def _facts(report: dict[str, Any]) -> list[Fact]:
    resumed = number(report, "resumed_from")
    best = number(report, "best", "step")
    return [
        Fact("Optimiser steps", shown(number(report, "steps"), count, _LACKING)),
        Fact("Epochs", shown(number(report, "epochs"), precise, _LACKING), "passes over the training rows"),
        Fact("Parameters", shown(number(report, "params"), count, _LACKING), "trained"),
        Fact(
            "Simulated acceptance length",
            shown(number(report, "simulated_acceptance_length"), decimal, _UNVALIDATED),
            "of the draft that is exported, on validation rows",
        ),
        Fact(
            "Validation loss of that draft",
            shown(number(report, "best", "eval_loss"), precise, _UNVALIDATED),
            f"at step {count(best)}" if best is not None else "",
        ),
        Fact("Tokens", shown(number(report, "tokens"), count, _LACKING), "trained on, all epochs"),
        Fact("Speed", shown(number(report, "tokens_per_second"), rate, _LACKING), "all processes, over training steps"),
        Fact(
            "Time", shown(number(report, "seconds"), duration, _LACKING), "in training steps, all resumed runs together"
        ),
        Fact("Processes", shown(number(report, "world_size"), count, _LACKING), "one a GPU, or one on the CPU"),
        Fact(
            "Resumed from",
            Shown("not resumed") if resumed is None else Shown(f"step {count(resumed)}"),
            "" if resumed is None else "the newest complete checkpoint",
        ),
    ]


def points(history: list[Any], *path: str | int) -> Points:
    """Step and value of each entry that has the value."""
    return [(number(entry, "step") or 0, value) for entry in history if (value := number(entry, *path)) is not None]


def _curves(
    id: str, title: str, note: str, curves: dict[str, Points], why: str, form: Any = precise, **options: Any
) -> Chart:
    curves = {name: found for name, found in curves.items() if found}
    if not curves:
        return Chart(id, title, why=why)
    figure = charts.lines(curves, x="optimiser step", **options)
    values = {name: dict(found) for name, found in curves.items()}
    steps = sorted({step for found in curves.values() for step, _ in found})
    every = -(-len(steps) // _TABLE_ROWS)
    chosen = steps if every == 1 else [*steps[:-1:every], steps[-1]]
    rows: list[list[Cell]] = [
        [count(step), *(form(value) if (value := values[name].get(step)) is not None else "" for name in curves)]
        for step in chosen
    ]
    table = Table(
        title,
        ["Step", *curves],
        rows,
        note="" if every == 1 else f"Every {every}th of {len(steps)} entries, and the last.",
    )
    return Chart(id, title, note, figure, table)


def _loss(history: list[Any]) -> Chart:
    return _curves(
        "loss",
        "Loss",
        "Cross-entropy to the target's distribution over the draft vocabulary, summed over the steps of the "
        "training-time test with falling weights.",
        {"training": points(history, "loss"), "validation": points(history, "eval_loss")},
        f"no losses: {_LACKING}",
        y="loss",
        dashes=("solid", "dot"),
    )


def _simulated(history: list[Any]) -> Chart:
    return _curves(
        "simulated",
        "Simulated acceptance length",
        "On validation rows: 1 + the expected number of drafted tokens accepted in a row, as many drafted as the "
        "training-time test has steps.",
        {"simulated acceptance length": points(history, "eval_acceptance_length")},
        _UNVALIDATED,
        decimal,
        y="tokens a step",
    )


def _accuracy(history: list[Any]) -> Chart:
    title = "Accuracy by step of the training-time test"
    name = "eval_accuracy" if any(listing(entry, "eval_accuracy") for entry in history) else "accuracy"
    where = "Validation rows" if name == "eval_accuracy" else "Training rows (there is no validation)"
    width = max((len(listing(entry, name)) for entry in history), default=0)
    return _curves(
        "accuracy",
        title,
        f"{where}: share of slots where the draft's likeliest token is the target's.",
        {f"step {step + 1}": points(history, name, step) for step in range(width)},
        f"no accuracies: {_LACKING}",
        share,
        y="accuracy",
        percent=True,
        colours=charts.ordered(width),
    )


def _speed(history: list[Any]) -> Chart:
    return _curves(
        "speed",
        "Training speed",
        "Tokens per second of all processes between two lines of the log; validation and checkpoints are not counted.",
        {"tokens/s": points(history, "tokens_per_second")},
        f"no speeds: {_LACKING}",
        count,
        y="tokens/s",
        from_zero=True,
    )


def _steps(report: dict[str, Any]) -> Table:
    accuracy, acceptance = numbers(report, "accuracy"), dig(report, "acceptance")
    rows: list[list[Cell]] = [
        [f"step {place + 1}", shown(value, share, _LACKING), shown(number(acceptance, place), share, _LACKING)]
        for place, value in enumerate(accuracy)
    ]
    return Table(
        "Validation rows at the end of training",
        ["Step of the test", "Accuracy", "Acceptance"],
        rows,
        note="Acceptance = accuracy among the slots whose earlier steps were all right.",
    )
