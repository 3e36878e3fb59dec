"""What the records of benchmarks/kimi_tp8.py amount to: ratios, the cost of a layer, and tables as benchmarks/RESULTS.md has them.

A record is a dictionary. 'pass': the median of the passes of one way over one length of prompts; 'engine': a way's start and
memory, written when it has ended; 'failed': a way that did not run, and why; 'warning'; 'folder': what a disk takes by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from extraction_engine import rates

Record = dict[str, Any]
# 'disk' is extraction to the folder of --disk.
WRITTEN = ("plain", "ours", "disk", "connector")
# Those whose cost a layer has a part in: a few layers write to a disk as fast as the disk takes it.
_COMPUTED = ("plain", "ours", "connector")


def finished(records: Iterable[Record]) -> set[tuple[int, str]]:
    """(layers, way) of the engines that need not be run again."""
    return {(one["layers"], one["way"]) for one in records if one["record"] == "engine"}


def passes(records: Iterable[Record]) -> dict[tuple[int, int], dict[str, Record]]:
    """For each (layers, length of prompts) the record of each way; of several the last, as a call may have been cut off."""
    found: dict[tuple[int, int], dict[str, Record]] = {}
    for one in records:
        if one["record"] == "pass":
            found.setdefault((one["layers"], one["prompts"]), {})[one["way"]] = one
    return dict(sorted(found.items()))


def engines(records: Iterable[Record]) -> dict[tuple[int, str], Record]:
    """The start and memory of each way, by (layers, way)."""
    found = {(one["layers"], one["way"]): one for one in records if one["record"] == "engine"}
    return dict(sorted(found.items(), key=lambda item: (item[0][0], WRITTEN.index(item[0][1]))))


def line(few: float, deep: float, depths: tuple[int, int], whole: int) -> tuple[float, float]:
    """(what a layer costs, what ``whole`` layers would), by the costs ``few`` and ``deep`` of the two ``depths``.

    The one dense layer is in both, so the difference is that of layers with experts.
    """
    slope = (deep - few) / (depths[1] - depths[0])
    return slope, deep + slope * (whole - depths[1])


def slopes(records: Sequence[Record], depths: tuple[int, int], whole: int) -> list[dict[str, Any]]:
    """For each way and length what a layer adds to a pass, and tokens/s of ``whole`` layers by that; then the same of starts.

    Starts are left out where the few layers took no less than the many: a machine's first engines compile what later ones find.
    """
    found, out = passes(records), []
    for length in sorted({length for _, length in found}):
        few, deep = (found.get((depth, length), {}) for depth in depths)
        for way in _COMPUTED:
            if way not in few or way not in deep:
                continue
            tokens = deep[way]["tokens"]
            each, all_of_them = line(few[way]["seconds"], deep[way]["seconds"], depths, whole)
            out.append(
                {
                    "way": way, "prompts": length, "seconds_per_layer": round(each, 5),
                    "microseconds_per_token_and_layer": round(1e6 * each / tokens, 4),
                    f"tokens_per_second_at_{whole}_layers": round(tokens / all_of_them, 1) if all_of_them > 0 else None,
                }
            )  # fmt: skip
    known = engines(records)
    for way in _COMPUTED:
        starts = [known[depth, way]["start_seconds"] for depth in depths if (depth, way) in known]
        if len(starts) == 2 and starts[0] < starts[1]:
            each, all_of_them = line(*starts, depths, whole)
            out.append(
                {
                    "way": way, "start_seconds_per_layer": round(each, 3),
                    f"start_seconds_at_{whole}_layers": round(all_of_them, 1),
                }
            )  # fmt: skip
    return out


def ratios(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Tokens/s, GB/s and ratios for each depth and length."""
    return [{"layers": layers, "prompts": length, **rates(ways)} for (layers, length), ways in passes(records).items()]


def tables(records: Sequence[Record], depths: tuple[int, int], whole: int) -> str:
    """Three tables in Markdown: speed, starts and memory, the cost of a layer."""
    speed = [
        [
            one["layers"], one["prompts"], _number(one.get("plain_tokens_per_second")), _number(one.get("ours_tokens_per_second")),
            one.get("ratio_to_prefill"), _number(one.get("disk_tokens_per_second")), one.get("ratio_disk_to_prefill"),
            _number(one.get("connector_tokens_per_second")), one.get("ratio_to_connector"), one.get("ours_gb_per_second"),
            one.get("disk_gb_per_second"),
        ]
        for one in ratios(records)
    ]  # fmt: skip
    starts = [
        [
            layers, way, one["start_seconds"], one["startup"].get("import"), _hundredths(one["by_log"].get("weights")),
            _hundredths(one["by_log"].get("profile and warm-up")), one["startup"].get("attach"),
            ", ".join(f"{held:g}" for held in one["peak_gpu_gb"]), one["peak_host_gb"],
        ]
        for (layers, way), one in engines(records).items()
    ]  # fmt: skip
    costs = [
        [one["way"], one["prompts"], one["seconds_per_layer"], one["microseconds_per_token_and_layer"], _number(one[f"tokens_per_second_at_{whole}_layers"])]
        for one in slopes(records, depths, whole)
        if "prompts" in one
    ]  # fmt: skip
    return "\n".join(
        [
            *_table(
                ["layers", "prompts of", "plain prefill, tokens/s", "extraction to tmpfs", "of prefill", "to disk", "of prefill", "vLLM's connector", "of the connector", "GB/s to tmpfs", "GB/s to disk"],
                speed,
            ),
            *_table(
                ["layers", "way", "start, s", "import", "weights", "profile and warm-up", "attach", "peak of each GPU, GB", "peak of the host, GB"],
                starts,
            ),
            *_table(
                ["way", "prompts of", "seconds a layer adds to a pass", "µs a token and layer", f"tokens/s at {whole} layers by that"],
                costs,
            ),
        ]
    )  # fmt: skip


def _hundredths(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:,.0f}"


def _table(head: list[str], rows: list[list[Any]]) -> list[str]:
    if not rows:
        return []
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join('' if cell is None else str(cell) for cell in row)} |" for row in lines] + [""]
