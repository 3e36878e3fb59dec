"""extract_shard: hidden states of one shard's rows, into the store; the output is a manifest of where they are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from draftsmith import engine, hardware, store
from draftsmith.config import Config
from draftsmith.errors import DraftsmithError
from draftsmith.extract_shard import driver, plan
from draftsmith.files import check_writable, read_json, write_json
from draftsmith.layers import resolve_layers
from draftsmith.log import log
from draftsmith.rows import read_rows
from draftsmith.signals import EXIT_TERMINATED, Termination


def run(config: Config, *, target: Path, rows: Path, scatteritem: str, gpus: int | None, manifest: Path) -> None:
    """Extract what the store lacks of the shard ``scatteritem`` (as ``1-of-2``) and write its manifest.

    ``gpus`` is how many the scheduler granted; None when nobody was asked. Raises :class:`DraftsmithError` when more
    than ``extract.max_failed_fraction`` of the shard's rows cannot be extracted.
    """
    described = read_json(target)
    described["layers"] = resolve_layers(config.target.layers, described["num_layers"])
    engine.check_granted(config, gpus)
    check_writable(Path(config.extract.store), "extract.store")
    dtype = hardware.target_dtype(config.target.dtype, described["torch_dtype"])
    key = store.fingerprint(described["fingerprint"], described["layers"], dtype, config.engine.args)
    folder = Path(config.extract.store) / key
    folder.mkdir(parents=True, exist_ok=True)

    table = read_rows(rows, ["row_id", "input_ids", "length"])
    every = [plan.PlannedRow(row, int(length)) for row, length in zip(table["row_id"], table["length"], strict=True)]
    mine = plan.share(every, scatteritem, config.extract.batch_tokens)
    index = store.scan(folder, key)
    for reason in index.bad.values():
        log(f"extract: {reason}")
    todo = plan.missing(mine, index.rows)
    batches = plan.pack(todo, config.extract.batch_tokens)
    log(
        f"extract: shard {scatteritem}: {len(mine)} rows, {len(mine) - len(todo)} are in the store already, "
        f"{len(todo)} to extract in {len(batches)} batches"
    )
    figures: dict[str, Any] = {"batches": 0, "tokens": 0, "bytes": 0, "seconds": 0.0, "failed": []}
    if batches:
        need = sum(row.length for row in todo)
        driver.check_space(
            folder, need, store.bytes_per_token(len(described["layers"]), described["hidden_size"], dtype)
        )
        wanted = {row.row_id for row in todo}
        tokens = {
            row: ids.tolist() for row, ids in zip(table["row_id"], table["input_ids"], strict=True) if row in wanted
        }
        with Termination() as termination:
            figures = driver.extract(config, described, folder, key, dtype, batches, tokens, scatteritem, termination)
        if termination.asked:
            log(
                f"extract: ended by {termination.name}; {figures['batches']} batches were added, run the same command again to go on"
            )
            sys.exit(EXIT_TERMINATED)
        index = store.scan(folder, key)
    failed = {entry["row_id"]: entry for entry in figures["failed"]}
    lost = [row.row_id for row in mine if row.row_id not in index.rows and row.row_id not in failed]
    if lost:
        raise DraftsmithError(
            f"{folder}: {len(lost)} rows are neither in the store nor in the ledger, the first is {lost[0]}; run it again"
        )
    share = len(failed) / len(mine) if mine else 0.0
    if share > config.extract.max_failed_fraction:
        raise DraftsmithError(
            f"{len(failed)} of {len(mine)} rows could not be extracted, more than extract.max_failed_fraction "
            f"({config.extract.max_failed_fraction}) allows; the first: {next(iter(failed.values()))['traceback']}"
        )
    write_json(
        manifest,
        {
            "format": store.FORMAT_VERSION,
            "store": str(folder),
            "fingerprint": key,
            "layers": described["layers"],
            "dtype": dtype,
            "hidden_size": described["hidden_size"],
            "rows": {row.row_id: list(index.rows[row.row_id]) for row in mine if row.row_id in index.rows},
            "failed": list(failed.values()),
            "figures": {name: value for name, value in figures.items() if name != "failed"}
            | {"reused_rows": len(mine) - len(todo)},
        },
    )
