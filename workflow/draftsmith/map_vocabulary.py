"""map_vocabulary: the target's tokens that the draft can predict, chosen by how often the training rows supervise them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from draftsmith.config import Config
from draftsmith.errors import DraftsmithError
from draftsmith.files import atomic_path, read_json, write_json
from draftsmith.log import log

Ids = NDArray[np.int64]

_COLUMNS = ("split", "input_ids", "span_starts", "span_ends")
# Rows of weighted sources have it: how often a pass of training takes them.
_REPEATS = "repeats"
_BATCH_ROWS = 4096
# Sizes whose coverage the report shows beside that of the chosen one.
_SIZES = (1000, 2000, 4000, 8000, 16000, 32000, 64000, 128000)
# Coverages in per cent for which the report names the smallest size that has them.
_WANTED = (95, 98, 99)


def run(config: Config, *, target: Path, rows: Path, tokenize_report: Path, vocabulary: Path, report: Path) -> None:
    """Choose the draft's vocabulary and write ``vocabulary`` (safetensors) and ``report``.

    ``vocabulary`` holds ``d2t`` int64 [Vd], where draft id i stands for target id ``i + d2t[i]``, and ``t2d`` bool [V],
    true where the target's id is in it; target ids ascend with draft ids. Where ``train.initial_draft`` is set it is that
    draft's vocabulary. Raises :class:`DraftsmithError` when
    ``vocabulary.size`` does not fit the target.
    """
    from safetensors.numpy import save_file

    total = int(read_json(target)["vocab_size"])
    taken = _of_source(config.train.source, total)
    size = resolve_size(config.vocabulary.size, total) if taken is None else len(taken)
    special = [int(token) for token in read_json(tokenize_report)["special_ids_kept"]]
    counted = count_supervised(rows, total)
    counts = counted["train"]
    ids, padded = choose(counts, size, special) if taken is None else (taken, 0)
    t2d = np.zeros(total, dtype=np.bool_)
    t2d[ids] = True
    with atomic_path(vocabulary) as temporary:
        save_file({"d2t": ids - np.arange(size, dtype=np.int64), "t2d": t2d}, str(temporary))
    inside = coverage(counts, ids)
    order = rank(counts, special)
    least = len(set(special))
    sizes = sorted({size, total, *(shown for shown in _SIZES if least <= shown < total)})
    figures = {
        "size": size,
        "target_size": total,
        "coverage": inside,
        "distinct": int(np.count_nonzero(counts)),
        "padded": padded,
        "kept_special": sorted(token for token in set(special) if t2d[token]),
        "coverage_by_size": _by_size(counts, order, sizes),
        "size_by_coverage": _by_coverage(counts, order, least),
    }
    # What training never saw, in the vocabulary that training chose: the honest figure.
    held_out = counted.get("validation")
    if held_out is not None and held_out.any():
        figures["validation"] = {
            "coverage": coverage(held_out, ids),
            "coverage_by_size": _by_size(held_out, order, sizes),
            "size_by_coverage": _by_coverage(held_out, order, least),
        }
    write_json(report, figures)
    log(
        f"vocabulary: {size} of the target's {total} tokens cover {100 * inside:.2f} % of {int(counts.sum())} supervised "
        f"training tokens ({int(np.count_nonzero(counts))} distinct)"
    )


def _of_source(source: Path | None, total: int) -> Ids | None:
    """Target ids of the draft that training goes on from, if there is one: its head knows no others."""
    if source is None:
        return None
    from draftsmith.draft.warm_start import source_vocabulary

    ids: Ids = source_vocabulary(source, total).numpy()
    log(f"the draft vocabulary is that of {source}: {len(ids)} tokens, whatever vocabulary.size says")
    return ids


def resolve_size(size: int | None, total: int) -> int:
    """Tokens of the draft vocabulary: ``size``, or all ``total`` of the target's."""
    if size is not None and size > total:
        raise DraftsmithError(
            f"vocabulary.size is {size}, but the target's vocabulary has only {total} tokens; set it to {total} or "
            "less, or leave it unset"
        )
    return total if size is None else size


def count_supervised(rows: Path, total: int) -> dict[str, Ids]:
    """How often each of ``total`` token ids [total] is supervised, by split of the rows; ``train`` is always among them.

    A row counts as often as a pass of training takes it.

    Raises :class:`DraftsmithError` when no token of a training row is supervised, or one is none of the target's.
    """
    import pyarrow.parquet as pq

    counts = {"train": np.zeros(total, dtype=np.int64)}
    if not rows.is_file():
        raise DraftsmithError(f"{rows}: no such file; run the stage tokenize first")
    with pq.ParquetFile(rows) as opened:
        weighted = _REPEATS in opened.schema_arrow.names
        for batch in opened.iter_batches(_BATCH_ROWS, columns=[*_COLUMNS, *([_REPEATS] if weighted else [])]):
            columns = (batch.column(name) for name in _COLUMNS)
            often = batch.column(_REPEATS).to_pylist() if weighted else [1] * batch.num_rows
            pieces: dict[tuple[str, int], list[NDArray[np.int32]]] = {}
            for times, split, ids, starts, ends in zip(often, *columns, strict=True):
                tokens = ids.values.to_numpy()
                pieces.setdefault((split.as_py(), times), []).extend(
                    tokens[start:end] for start, end in zip(starts.as_py(), ends.as_py(), strict=True)
                )
            for (name, times), parts in pieces.items():
                found = np.bincount(np.concatenate([np.empty(0, dtype=np.int32), *parts]), minlength=total)
                if len(found) > total:
                    raise DraftsmithError(
                        f"{rows}: holds token id {len(found) - 1}, but the target's vocabulary has {total}; tokenise for "
                        "this target again"
                    )
                counts[name] = counts.get(name, 0) + times * found
    if not counts["train"].any():
        raise DraftsmithError(f"{rows}: no token of a training row is supervised; run the stage tokenize again")
    return counts


def choose(counts: Ids, size: int, special: Iterable[int]) -> tuple[Ids, int]:
    """The ``size`` target ids of the draft vocabulary, ascending, and how many of them were never counted.

    They are the first of :func:`rank`. The order matters: rows of the target's head are taken in that of t2d.
    """
    kept = set(special)
    if len(kept) > size:
        raise DraftsmithError(
            f"vocabulary.size is {size}, but {len(kept)} special tokens must stay in the draft's vocabulary; set it to "
            f"{len(kept)} or more"
        )
    chosen = np.sort(rank(counts, kept)[:size])
    return chosen, int(np.count_nonzero(counts[chosen] == 0))


def rank(counts: Ids, special: Iterable[int]) -> Ids:
    """All target ids, the one first that is worth a place most.

    Special ids come first, since a draft that cannot end a turn drafts past its end; then the most frequent, of equals
    the smaller id; then what was never counted, smallest id first.
    """
    kept = sorted(set(special))
    if kept and not 0 <= kept[0] <= kept[-1] < len(counts):
        raise DraftsmithError(
            f"special token ids {kept[0]} to {kept[-1]} do not fit a target vocabulary of {len(counts)}; tokenise for "
            "this target again"
        )
    rest = np.ones(len(counts), dtype=np.bool_)
    rest[kept] = False
    ids = np.flatnonzero(rest)
    # A stable sort leaves equals in the order of their ids.
    return np.concatenate([np.asarray(kept, dtype=np.int64), ids[np.argsort(-counts[ids], kind="stable")]])


def coverage(counts: Ids, ids: Ids) -> float:
    """Share of the counted tokens that are among ``ids``."""
    return float(counts[ids].sum() / counts.sum())


def _by_size(counts: Ids, order: Ids, sizes: Iterable[int]) -> list[list[float]]:
    """Coverage of ``counts`` by the first tokens of ``order``, for each of ``sizes``."""
    inside = np.cumsum(counts[order])
    return [[size, float(inside[size - 1] / inside[-1])] for size in sizes]


def _by_coverage(counts: Ids, order: Ids, least: int) -> list[list[float]]:
    """For each share of :data:`_WANTED` how many of the first tokens of ``order`` have it, and never under ``least``."""
    inside = np.cumsum(counts[order])
    # In whole numbers, as 0.95 has no exact float.
    return [[wanted / 100, max(int(np.argmax(100 * inside >= wanted * inside[-1])) + 1, least)] for wanted in _WANTED]
