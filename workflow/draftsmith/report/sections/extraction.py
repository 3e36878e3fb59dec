"""Hidden states: what is in the store, how fast it came, and what failed."""

from __future__ import annotations

from typing import Any

from draftsmith.report.data import Gathered
from draftsmith.report.failures import failure_details
from draftsmith.report.model import Cell, Fact, Notice, Section, Table
from draftsmith.report.values import (
    count,
    counted,
    decimal,
    dig,
    duration,
    listing,
    number,
    rate,
    ratio,
    share,
    shown,
    size,
    text,
    total,
)

_LACKING = "not in extract/manifest.json"
_IDLE = "every row was in the store already"


def section(gathered: Gathered) -> Section:
    """The store's contents and the shards' figures."""
    made = Section(
        "extraction",
        "Extraction",
        "Hidden states of every row, read while vLLM prefills it: the inputs of the captured layers, and the final "
        "state after the target's last norm.",
    )
    manifest = gathered.of("merge_manifest")
    if "merge_manifest" in gathered.absent:
        made.missing = gathered.absent["merge_manifest"]
        return made
    failed = listing(manifest, "failed")
    stored = dig(manifest, "rows")
    rows = len(stored) if isinstance(stored, dict | list) else None
    made.facts = _facts(gathered, manifest, rows, len(failed))
    if gathered.shards:
        made.tables.append(_shards(gathered.shards))
    if failed:
        whole = len(failed) + (rows or 0)
        made.notices.append(
            Notice(
                "warn",
                f"Of {counted(whole, 'row')}, {count(len(failed))} could not be extracted "
                f"({share(len(failed) / whole)}); training goes on without them.",
            )
        )
        made.details += failure_details(failed, "row_id", "row")
    return made


def files(manifest: dict[str, Any]) -> int | None:
    """Batch files that hold the rows."""
    named = number(manifest, "files")
    if named is not None:
        return int(named)
    places = dig(manifest, "rows")
    return (
        len({place[0] for place in places.values() if isinstance(place, list) and place})
        if isinstance(places, dict)
        else None
    )


def throughput(shards: dict[str, dict[str, Any]]) -> float | None:
    """Tokens per second of one engine: all tokens extracted in this run over all seconds of extracting, without "
    "loads."""
    figures = [dig(shard, "figures") for shard in shards.values()]
    return ratio(
        total([number(entry, "tokens") for entry in figures]) or None,
        total([number(entry, "seconds") for entry in figures]),
    )


def _facts(gathered: Gathered, manifest: dict[str, Any], rows: int | None, failed: int) -> list[Fact]:
    tokens, size_bytes = number(manifest, "tokens"), number(manifest, "bytes")
    speed = throughput(gathered.shards)
    layers = listing(manifest, "layers")
    idle = _IDLE if gathered.shards else "no shard's manifest is there"
    return [
        Fact("Rows in the store", shown(rows, count, _LACKING)),
        Fact("Rows that failed", shown(failed, count, _LACKING)),
        Fact("Tokens", shown(tokens, count, _LACKING)),
        Fact("Speed", shown(speed, rate, idle), "of one engine, its load not counted"),
        Fact("Store", shown(size_bytes, size, _LACKING), "batch files that hold these rows"),
        Fact(
            "Bytes a token",
            shown(ratio(size_bytes, tokens), count, _LACKING),
            f"{len(layers)} layers and the final state" if layers else "",
        ),
        Fact("Files", shown(files(manifest), count, _LACKING)),
        Fact("Layers", text(", ".join(map(str, layers)), _LACKING), "k = the residual stream that enters layer k"),
        Fact("Precision", text(dig(manifest, "dtype"), _LACKING)),
    ]


def _shards(shards: dict[str, dict[str, Any]]) -> Table:
    rows: list[list[Cell]] = []
    for item, shard in shards.items():
        figures = dig(shard, "figures")
        idle = "no figures in its manifest" if not isinstance(figures, dict) else _IDLE
        tokens = number(figures, "tokens")
        rows.append(
            [
                item,
                text(dig(figures, "method"), idle),
                shown(number(shard, "rows"), count, "its manifest cannot be read"),
                shown(number(figures, "reused_rows"), count, idle),
                shown(tokens, count, idle),
                shown(number(figures, "tokens_per_second"), decimal, idle),
                shown(number(figures, "bytes"), size, idle),
                shown(number(figures, "load_seconds"), duration, idle),
                shown(number(figures, "seconds") or None, duration, idle),
                shown(number(figures, "writer", "blocked_seconds"), duration, idle),
            ]
        )
    return Table(
        "Shards; each is one load of the target",
        [
            "Shard",
            "States read",
            "Rows",
            "Reused",
            "New tokens",
            "Tokens/s",
            "New bytes",
            "Load",
            "Extracting",
            "Waited for disk",
        ],
        rows,
        numeric=2,
        note="Reused rows were in the store before. 'native': by the model's own EAGLE-3 interface; 'hooks': by hooks on "
        "its layers.",
    )
