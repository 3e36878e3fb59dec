"""extract_shard: hidden states of one shard's rows, into the store; the output is a manifest of where they are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from draftsmith import engine, get_target, hardware, store
from draftsmith.config import Config
from draftsmith.errors import DraftsmithError
from draftsmith.extract_shard import driver, plan, space
from draftsmith.extract_shard.staging import unwritable
from draftsmith.files import read_json, write_json
from draftsmith.layers import resolve_layers
from draftsmith.log import log
from draftsmith.rows import read_rows
from draftsmith.signals import EXIT_TERMINATED, Termination
from draftsmith.target_fingerprint import states_fingerprint


def run(config: Config, *, target: Path, rows: Path, scatteritem: str, gpus: int | None, manifest: Path) -> None:
    """Extract what the store lacks of the shard ``scatteritem`` (as ``1-of-2``) and write its manifest.

    ``gpus`` is how many the scheduler granted; None when nobody was asked. Raises :class:`DraftsmithError` when more
    than ``extract.max_failed_fraction`` of the shard's rows cannot be extracted.
    """
    described = read_json(target)
    described["layers"] = resolve_layers(config.target.layers, described["num_layers"])
    engine.check_granted(config, gpus)
    dtype = hardware.target_dtype(config.target.dtype, described["torch_dtype"])
    storage = config.extract.storage
    stored = store.stored_as(storage, dtype)
    key = store.fingerprint(states_fingerprint(described), described["layers"], dtype, config.engine.args, storage)
    folder = Path(config.extract.store) / key
    refusal = unwritable(folder)

    # What the store holds of each row: all of it, or with supervised_only what is left of it, maybe the same for several.
    kept = plan.stored_rows(rows, config.extract.supervised_only)
    per_token = store.bytes_per_token(len(described["layers"]), described["hidden_size"], dtype, storage)
    batch_tokens = plan.batch_tokens(config.extract.batch_tokens, per_token)
    mine = plan.share(list(kept.values()), scatteritem, batch_tokens)
    if refusal is not None and plan.missing(mine, store.scan(folder, key).rows):
        # Told before terabytes are verified.
        raise refusal
    index = store.trusted(folder, key, [row.row_id for row in mine])
    todo = plan.missing(mine, index.rows)
    if todo and refusal is not None:
        raise refusal
    log(
        f"extract: shard {scatteritem}: {len(mine)} rows, {len(mine) - len(todo)} are in the store already, {len(todo)} to extract"
    )
    outcome = driver.Outcome()
    if todo:
        folder.mkdir(exist_ok=True)
        if not engine.dummy_weights(config):
            # Described once, maybe long ago and on another machine; what is missing now would only be found by the load.
            get_target.weight_files(Path(described["path"]), described.get("source", "?"))
        space.check_space(folder, sum(row.length for row in todo), per_token)
        wanted = set(todo)
        table = read_rows(rows, ["row_id", "input_ids"])
        tokens = {
            kept[row].row_id: ids[: kept[row].length].tolist()
            for row, ids in zip(table["row_id"], table["input_ids"], strict=True)
            if kept[row] in wanted
        }
        job = driver.Job(config, described, folder, key, stored, todo, batch_tokens, per_token, tokens, scatteritem)
        with Termination() as termination:
            outcome = driver.extract(job, termination)
        if outcome.stopped:
            _stopped(outcome, termination)
        index = store.trusted(folder, key, [row.row_id for row in mine])
        # Another process may have published what failed here.
        outcome.failed = {row: entry for row, entry in outcome.failed.items() if row not in index.rows}
    ours = set(mine)
    _check_complete(config, folder, mine, index, outcome)
    write_json(
        manifest,
        {
            "format": store.FORMAT_VERSION,
            "store": str(folder),
            "fingerprint": key,
            "layers": described["layers"],
            "dtype": stored[0],
            "storage": stored[1],
            "hidden_size": described["hidden_size"],
            "supervised_only": config.extract.supervised_only,
            "rows": {
                row: list(index.rows[left.row_id])
                for row, left in kept.items()
                if left in ours and left.row_id in index.rows
            },
            "failed": [
                _failed(row, outcome.failed[left.row_id]) for row, left in kept.items() if left.row_id in outcome.failed
            ],
            "figures": outcome.figures | {"reused_rows": len(mine) - len(todo)},
        },
    )


def _stopped(outcome: driver.Outcome, termination: Termination) -> None:
    done = f"{outcome.figures['batches']} batches were added, run the same command again to go on"
    if termination.asked:
        log(f"extract: ended by {termination.name}; {done}")
        sys.exit(EXIT_TERMINATED)
    raise DraftsmithError(f"{outcome.stopped}; {done} once there is more, or name another folder in extract.store")


def _failed(row: str, entry: dict[str, Any]) -> dict[str, Any]:
    return {"row_id": row, "error": f"{entry['type']}: {entry['message']}", "traceback": entry["traceback"]}


def _check_complete(
    config: Config, folder: Path, mine: list[plan.PlannedRow], index: store.StoreIndex, outcome: driver.Outcome
) -> None:
    lost = [row.row_id for row in mine if row.row_id not in index.rows and row.row_id not in outcome.failed]
    if lost:
        raise DraftsmithError(
            f"{folder}: {len(lost)} rows are neither in the store nor in the ledger, the first is {lost[0]}; run it again"
        )
    share = len(outcome.failed) / len(mine) if mine else 0.0
    if share > config.extract.max_failed_fraction:
        raise DraftsmithError(
            f"{len(outcome.failed)} of {len(mine)} rows could not be extracted, more than extract.max_failed_fraction "
            f"({config.extract.max_failed_fraction}) allows; the first: {next(iter(outcome.failed.values()))['traceback']}"
        )
