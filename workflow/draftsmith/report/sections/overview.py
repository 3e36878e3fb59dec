"""The headline: a sentence, the figures that matter most, and what the reader must not miss."""

from __future__ import annotations

from draftsmith.report.data import Gathered
from draftsmith.report.model import Notice, Tile
from draftsmith.report.sections import evaluation, extraction
from draftsmith.report.values import (
    count,
    counted,
    decimal,
    dig,
    duration,
    listing,
    mapping,
    number,
    ratio,
    share,
    shown,
    size,
    times,
    total,
)


def tiles(gathered: Gathered) -> list[Tile]:
    """Acceptance length, untrained draft, speed-up, rows, store, time."""
    return [
        _acceptance(gathered),
        _untrained(gathered),
        _speedup(gathered),
        _rows(gathered),
        _store(gathered),
        _time(gathered),
    ]


def data_tiles(gathered: Gathered) -> list[Tile]:
    """Rows, tokens, what is supervised and what was left out."""
    report, looked = gathered.of("tokenize"), gathered.of("look")
    why = _absent(gathered, "tokenize", "not in tokenize/tokenize.json")
    tokens, read = number(report, "tokens"), number(report, "conversations")
    left_out = total([number(value) for value in mapping(report, "dropped").values()]) or 0
    rows = total([number(value) for value in mapping(looked, "rows").values()])
    return [
        Tile("Rows", shown(rows, count, "not in look/look.json"), "training and validation"),
        Tile("Tokens", shown(tokens, count, why), "in all rows"),
        Tile("Supervised", shown(ratio(number(report, "supervised"), tokens), share, why), "of the rows' tokens"),
        Tile(
            "Left out",
            shown(None if read is None else left_out, count, why),
            f"of {counted(read or 0, 'conversation')}",
        ),
    ]


def notices(gathered: Gathered) -> list[Notice]:
    """What went wrong, or is not as it should be, in a line each; the sections tell more."""
    made = [
        Notice(notice.level, notice.text, notice.points) for notice in evaluation.notices(gathered.of("evaluate_draft"))
    ]
    failed = len(listing(gathered.of("merge_manifest"), "failed"))
    if failed:
        made.append(
            Notice("warn", f"{counted(failed, 'row')} could not be extracted; see the errors under Extraction.")
        )
    absent = [reason for stage, reason in gathered.absent.items() if stage not in ("merge_answers", "clean_gpus")]
    if absent:
        made.append(Notice("warn", "Results of some stages are missing; their parts of the page are empty.", absent))
    return made


def _absent(gathered: Gathered, stage: str, else_why: str) -> str:
    return f"{stage} has no results" if stage in gathered.absent else else_why


def _acceptance(gathered: Gathered) -> Tile:
    report = gathered.of("evaluate_draft")
    length = number(report, "acceptance_length")
    k, prompts, minimum = number(report, "k"), number(report, "prompts"), number(report, "gate", "minimum")
    parts = ["1 + accepted / drafts"]
    if k is not None:
        parts.append(f"k = {count(k)}")
    if prompts is not None:
        parts.append(counted(prompts, "held-out prompt"))
    passed = dig(report, "gate", "passed")
    badge = ""
    # Every draft reaches 1.
    if minimum is not None and minimum > 1 and isinstance(passed, bool):
        badge = f"gate {minimum:g}: {'passed' if passed else 'failed'}"
    why = _absent(gathered, "evaluate_draft", "not in evaluate/evaluate.json")
    return Tile("Acceptance length", shown(length, decimal, why), ", ".join(parts), badge, "ok" if passed else "fail")


def _untrained(gathered: Gathered) -> Tile:
    value = number(gathered.of("evaluate_draft"), "untrained", "acceptance_length")
    why = _absent(gathered, "evaluate_draft", evaluation.UNTRAINED_OFF)
    prompts = number(gathered.of("evaluate_draft"), "untrained", "prompts")
    some = "" if prompts is None else f", on {count(prompts)} of the prompts"
    return Tile("Untrained draft", shown(value, decimal, why), f"acceptance length before training{some}")


def _speedup(gathered: Gathered) -> Tile:
    report = gathered.of("evaluate_draft")
    plain, drafted = number(report, "tokens_per_second", "plain"), number(report, "tokens_per_second", "draft")
    note = "generated tokens/s with the draft / without"
    if plain is not None and drafted is not None:
        note = f"{plain:,.1f} to {drafted:,.1f} generated tokens/s"
    at_once = number(report, "requests_at_once")
    if at_once is not None:
        note += f", up to {count(at_once)} at once"
    why = _absent(gathered, "evaluate_draft", "not in evaluate/evaluate.json")
    return Tile("Speed-up", shown(number(report, "speedup"), times, why), note)


def _rows(gathered: Gathered) -> Tile:
    report, trained = gathered.of("tokenize"), gathered.of("train_draft")
    tokens, epochs, seen = (
        number(report, "tokens_by_split", "train"),
        number(trained, "epochs"),
        number(trained, "tokens"),
    )
    parts = []
    if tokens is not None:
        parts.append(counted(tokens, "token"))
    if epochs is not None:
        parts.append(f"{epochs:g} epoch{'' if epochs == 1 else 's'}")
    if seen is not None:
        parts.append(f"{count(seen)} trained on in all")
    why = _absent(gathered, "tokenize", "not in tokenize/tokenize.json")
    return Tile(
        "Training rows", shown(number(report, "by_split", "train"), count, why), ", ".join(parts) or "train split"
    )


def _store(gathered: Gathered) -> Tile:
    manifest = gathered.of("merge_manifest")
    held, files = number(manifest, "bytes"), extraction.files(manifest) if manifest else None
    each = ratio(held, number(manifest, "tokens"))
    parts = [f"hidden states in {counted(files, 'file')}" if files is not None else "hidden states"]
    if each is not None:
        parts.append(f"{count(each)} bytes a token")
    return Tile(
        "Store",
        shown(held, size, _absent(gathered, "merge_manifest", "not in extract/manifest.json")),
        ", ".join(parts),
    )


def _time(gathered: Gathered) -> Tile:
    seconds, jobs = gathered.benchmarks.seconds(), gathered.benchmarks.count()
    note = f"sum over the last run of {counted(jobs, 'measured job')}" if jobs else "sum over measured jobs"
    return Tile("Total time", shown(seconds, duration, "no benchmark file was found"), note)
