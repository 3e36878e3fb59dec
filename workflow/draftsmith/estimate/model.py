"""What ``draftsmith estimate`` tells, as ``--json`` prints it: sizes in bytes, times in seconds, each with its formula."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Part(BaseModel):
    """A part of the answer."""

    model_config = ConfigDict(extra="forbid")


class Figure(Part):
    """A size with how it comes about, its numbers put in."""

    name: str
    bytes: int
    formula: str


class Target(Part):
    """The target, as its config.json tells."""

    source: str
    model_type: str
    read_from: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    layers: list[int]
    dtype: str
    """Precision in which it runs, and of its states."""
    device: Literal["cuda", "cpu"]
    tp: int


class Rows(Part):
    """What there is to extract and to train on."""

    how: Literal["known", "estimated"]
    explained: str
    rows: int
    """Distinct ones: what the store holds."""
    tokens: int
    longest: int
    training_tokens: int
    """Of one pass, a row that a pass takes twice counted twice."""
    supervised_tokens: int
    prompts: int
    """Kept for the evaluation."""
    conversations: int
    answers: int | None = None
    """What the target is to write, where it writes the answers."""
    answer_tokens: int | None = None


class Storage(Part):
    """The store, if its states were kept in this precision."""

    storage: Literal["target", "bf16", "fp8"]
    chosen: bool
    bytes_per_token: int
    """Of the states alone."""
    batch_tokens: int
    files: int
    bytes: int
    """With token ids and the heads of the files."""
    formula: str


class Time(Part):
    """A stage's time: ``fixed_seconds`` a job, and the work at the rate; None where no rate is known."""

    stage: str
    jobs: int = 1
    work: int | None = None
    unit: str | None = None
    rate: float | None = None
    """Units a second and job."""
    fixed_seconds: float | None = None
    seconds: float | None = None
    """Of wall clock, the stage's jobs side by side."""
    gpu_seconds: float | None = None
    source: str
    """Where the rate is from, or what is missing."""
    formula: str


class Check(Part):
    """A need against what there is."""

    name: str
    status: Literal["ok", "warn", "fail", "unknown"]
    detail: str


class Estimate(Part):
    """Everything."""

    format: int = 1
    name: str
    target: Target
    rows: Rows
    store: list[Storage]
    disk: list[Figure]
    extraction_gpu: list[Figure]
    """On each GPU; empty on a CPU."""
    extraction_host: list[Figure]
    training_gpu: list[Figure]
    training_host: list[Figure]
    times: list[Time]
    checks: list[Check]
    assumptions: list[str]
    seconds: float
    """What the estimate took."""


def total(figures: list[Figure]) -> int:
    """Sum of the sizes."""
    return sum(figure.bytes for figure in figures)


def chosen(store: list[Storage]) -> Storage:
    """The one that the config asks for."""
    return next(each for each in store if each.chosen)
