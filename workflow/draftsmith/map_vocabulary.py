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
_BATCH_ROWS = 4096
# Sizes whose coverage the report shows beside that of the chosen one.
_SIZES = (1000, 2000, 4000, 8000, 16000, 32000, 64000, 128000)


def run(config: Config, *, target: Path, rows: Path, tokenize_report: Path, vocabulary: Path, report: Path) -> None:
    """Choose the draft's vocabulary and write ``vocabulary`` (safetensors) and ``report``.

    ``vocabulary`` holds ``d2t`` int64 [Vd], where draft id i stands for target id ``i + d2t[i]``, and ``t2d`` bool [V],
    true where the target's id is in it; target ids ascend with draft ids. Raises :class:`DraftsmithError` when
    ``vocabulary.size`` does not fit the target.
    """
    from safetensors.numpy import save_file

    total = int(read_json(target)["vocab_size"])
    size = resolve_size(config.vocabulary.size, total)
    special = [int(token) for token in read_json(tokenize_report)["special_ids_kept"]]
    counts = count_supervised(rows, total)
    ids, padded = choose(counts, size, special)
    t2d = np.zeros(total, dtype=np.bool_)
    t2d[ids] = True
    with atomic_path(vocabulary) as temporary:
        save_file({"d2t": ids - np.arange(size, dtype=np.int64), "t2d": t2d}, str(temporary))
    inside = coverage(counts, ids)
    sizes = sorted({size, total, *(shown for shown in _SIZES if len(special) <= shown < total)})
    write_json(
        report,
        {
            "size": size,
            "target_size": total,
            "coverage": inside,
            "distinct": int(np.count_nonzero(counts)),
            "padded": padded,
            "kept_special": sorted(set(special)),
            "coverage_by_size": [[shown, coverage(counts, choose(counts, shown, special)[0])] for shown in sizes],
        },
    )
    log(
        f"vocabulary: {size} of the target's {total} tokens cover {100 * inside:.2f} % of {int(counts.sum())} supervised "
        f"training tokens ({int(np.count_nonzero(counts))} distinct)"
    )


def resolve_size(size: int | None, total: int) -> int:
    """Tokens of the draft vocabulary: ``size``, or all ``total`` of the target's."""
    if size is not None and size > total:
        raise DraftsmithError(
            f"vocabulary.size is {size}, but the target's vocabulary has only {total} tokens; set it to {total} or "
            "less, or leave it unset"
        )
    return total if size is None else size


def count_supervised(rows: Path, total: int) -> Ids:
    """How often each of ``total`` token ids [total] is supervised in the rows that train."""
    import pyarrow.parquet as pq

    counts = np.zeros(total, dtype=np.int64)
    if not rows.is_file():
        raise DraftsmithError(f"{rows}: no such file; run the stage tokenize first")
    with pq.ParquetFile(rows) as opened:
        for batch in opened.iter_batches(_BATCH_ROWS, columns=list(_COLUMNS)):
            columns = (batch.column(name) for name in _COLUMNS)
            pieces = [np.empty(0, dtype=np.int32)]
            for split, ids, starts, ends in zip(*columns, strict=True):
                if split.as_py() == "train":
                    tokens = ids.values.to_numpy()
                    pieces += [tokens[start:end] for start, end in zip(starts.as_py(), ends.as_py(), strict=True)]
            found = np.bincount(np.concatenate(pieces), minlength=total)
            if len(found) > total:
                raise DraftsmithError(
                    f"{rows}: holds token id {len(found) - 1}, but the target's vocabulary has {total}; tokenise for "
                    "this target again"
                )
            counts += found
    if not counts.any():
        raise DraftsmithError(f"{rows}: no token of a training row is supervised; run the stage tokenize again")
    return counts


def choose(counts: Ids, size: int, special: Iterable[int]) -> tuple[Ids, int]:
    """The ``size`` target ids of the draft vocabulary, ascending, and how many of them were never counted.

    Special ids come first, since a draft that cannot end a turn drafts past its end; then the most frequent, of equals
    the smaller id; then the smallest ids left. The order matters: rows of the target's head are taken in that of t2d.
    """
    kept = sorted(set(special))
    if kept and not 0 <= kept[0] <= kept[-1] < len(counts):
        raise DraftsmithError(
            f"special token ids {kept[0]} to {kept[-1]} do not fit a target vocabulary of {len(counts)}; tokenise for "
            "this target again"
        )
    if len(kept) > size:
        raise DraftsmithError(
            f"vocabulary.size is {size}, but {len(kept)} special tokens must stay in the draft's vocabulary; set it to "
            f"{len(kept)} or more"
        )
    rest = np.ones(len(counts), dtype=np.bool_)
    rest[kept] = False
    ids = np.flatnonzero(rest)
    # A stable sort leaves equals in the order of their ids; what was not counted comes last, smallest id first.
    ranked = ids[np.argsort(-counts[ids], kind="stable")]
    chosen = np.sort(np.concatenate([np.asarray(kept, dtype=np.int64), ranked[: size - len(kept)]]))
    return chosen, int(np.count_nonzero(counts[chosen] == 0))


def coverage(counts: Ids, ids: Ids) -> float:
    """Share of the counted tokens that are among ``ids``."""
    return float(counts[ids].sum() / counts.sum())
