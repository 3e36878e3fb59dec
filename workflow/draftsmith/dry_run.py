"""dry_run: what only shows when the engine runs is found with few layers of dummy weights, before a load of many minutes.

extract_shard itself takes four rows through the whole path, with the same tensor parallelism and engine arguments, into a
store that is thrown away: the target's folder, with a config.json of few layers and with ``load_format: dummy``. What it
stored is then read as training reads it.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import psutil

from draftsmith import hardware, verdict
from draftsmith.config import Config
from draftsmith.errors import DraftsmithError
from draftsmith.few_layers import few_layers, shortened
from draftsmith.files import check_writable, read_json, write_json
from draftsmith.gpus import gpu_job
from draftsmith.layers import resolve_layers
from draftsmith.log import log
from draftsmith.processes.owned_folders import folder_name, sweep
from draftsmith.rows import read_rows
from draftsmith.signals import EXIT_TERMINATED, Termination
from draftsmith.verdict import Check, Found, Skip, made

_LAYERS = 4
_ROWS = 4
# It takes about two minutes; kernels that are compiled for the first time may take several more.
_SECONDS = 1800.0
_KEPT_LINES = 150
FOLDER = ".dry-run"

# What an error's text tells of, and the mend.
_HINTS = {
    r"out of memory|OutOfMemory|less than desired GPU memory|No available memory": (
        "memory ran out even with few layers: lower engine.max_num_batched_tokens, engine.max_num_seqs or engine.gpu_memory_utilization"
    ),
    r"divisible|cannot be split": "the target cannot be spread like this: choose another engine.tp",
    r"No module named|ImportError": "a package is missing: install the environment of envs/ anew, or what the checkpoint's code asks for",
    r"trust_remote_code": "the checkpoint brings Python code: set target.trust_remote_code",
    r"quantiz|quant_method|Marlin|W\d+A\d+": "the quantisation is not supported on this hardware: see engine.args.quantization, or take another checkpoint",
    r"NCCL|nccl": "the GPUs cannot talk to one another: NCCL_DEBUG=INFO tells more",
    r"it was ended after": "it hung: the last lines above it tell where; NCCL_DEBUG=INFO tells more where GPUs wait for one another",
    r"No space left|disk is full": "the disk of extract.store is full: free some, or name another folder",
}  # fmt: skip
_NO_HINT = "the same would come after the load of the whole target: mend what it names, or see engine.args"


def wanted(config: Config) -> str | None:
    """Why no dry run is wanted; None when one is."""
    if config.preflight.dry_run is False:
        return "preflight.dry_run is false"
    if config.preflight.dry_run is None and hardware.device() == "cpu":
        return "no GPU is used here, and preflight.dry_run is unset; set it to true for a dry run on the CPU"
    return None


def run(config: Config, *, target: Path, rows: Path, gpus: int | None, report: Path) -> None:
    """Make the dry run, print its table and write it as JSON; where none is wanted, say so and leave.

    Raises :class:`DraftsmithError` with the mend when it failed; the traceback is printed before.
    """
    begun = time.perf_counter()
    reason = wanted(config)
    if reason is not None:
        skipped = Check(name="dry run", status="skip", detail=reason)
        verdict.conclude("dry run", [skipped], report, begun, reason=reason)
        return
    gpu_job.begin(config, gpus)
    described = read_json(target)
    layers = resolve_layers(config.target.layers, described["num_layers"])
    with _folder(Path(config.extract.store)) as folder:
        trial = prepare(config, described, layers, rows, folder)
        log(
            f"dry run: {trial.rows} rows through {trial.count} of {described['num_layers']} layers with dummy weights, in about two minutes"
        )
        outcome = _run(trial, gpus)
        # The ledger goes with the store.
        kept = str(report.with_name(f"failed-{report.name}"))
        outcome = replace(outcome, text=re.sub(rf"{re.escape(str(folder))}\S*\.json", lambda _: kept, outcome.text))
        checks = [
            made("target", lambda: ("ok", trial.sentence(described))),
            made("extraction", lambda: _extraction(trial, outcome)),
            made("reading", lambda: _reading(trial)),
            made("store", lambda: _store(trial)),
        ]
        failed = outcome.code != 0
        if failed:
            log(f"dry run: what it ended with\n{outcome.text}")
            checks[1].traceback = outcome.text
        figures = {} if failed or not trial.manifest.is_file() else read_json(trial.manifest)["figures"]
        verdict.conclude(
            "dry run", checks, report, begun, figures={name: figures[name] for name in figures if name != "failed"}
        )


@dataclass(frozen=True)
class Trial:
    """A prepared dry run: its folder, its config as extract_shard takes it, and what it is about."""

    folder: Path
    config: Config
    count: int
    layers: list[int]
    rows: int
    tokens: int

    @property
    def manifest(self) -> Path:
        """What extract_shard writes when it has come to its end."""
        return self.folder / "manifest.json"

    def sentence(self, described: dict[str, Any]) -> str:
        """What is run."""
        name = " ".join(described.get("architectures") or [described["model_type"]])
        return f"{name} with {self.count} of its {described['num_layers']} layers, dummy weights, engine.tp {self.config.engine.tp}"


def prepare(config: Config, described: dict[str, Any], layers: Sequence[int], rows: Path, folder: Path) -> Trial:
    """Write what extract_shard needs into ``folder``: a target of few layers, the longest rows, a config.

    ``described`` is target.json's content, ``layers`` the ids that the run captures. Of the small target as many are
    captured, layer 0 among them if it is among those, as it is read in another way.
    """
    num_layers, source = described["num_layers"], Path(described["path"])
    small, count = few_layers(
        json.loads((source / "config.json").read_text()), num_layers, max(_LAYERS, len(layers) + 1)
    )
    first, others = [0] if 0 in layers else [], list(range(1, count))
    kept = first + others[len(others) - (len(layers) - len(first)) :]
    model = folder / "dry-run-target"
    model.mkdir()
    for path in source.iterdir():
        if path.name != "config.json":
            (model / path.name).symlink_to(path.resolve())
    # Not as strict as files of this project's own: some configs hold infinities.
    (model / "config.json").write_text(json.dumps(small, indent=2))
    write_json(
        folder / "target.json",
        described
        | {
            "path": str(model.resolve()),
            "num_layers": count,
            "fingerprint": "dry-run",
            "states_fingerprint": "dry-run",
        },
    )
    longest = read_rows(rows).nlargest(_ROWS, "length")
    longest.to_parquet(folder / "rows.parquet")
    args = {name: value for name, value in config.engine.args.items() if name != "model_loader_extra_config"}
    if isinstance(args.get("hf_overrides"), dict):
        args["hf_overrides"] = shortened(args["hf_overrides"], num_layers, count)
    changed = config.model_copy(
        update={
            "target": config.target.model_copy(update={"layers": kept}),
            "engine": config.engine.model_copy(update={"args": args | {"load_format": "dummy"}}),
            "extract": config.extract.model_copy(update={"store": str(folder / "store"), "max_engine_starts": 1}),
        }
    )
    return Trial(folder, changed, count, kept, len(longest), int(longest["length"].sum()))


@contextmanager
def _folder(store: Path) -> Iterator[Path]:
    """A folder in the store, so that its very disk is tried; what killed runs of this host left is removed."""
    try:
        check_writable(store, "extract.store")
    except DraftsmithError:
        # Nothing will be written to it: preflight has found every row there, or has ended the run.
        store = Path(tempfile.gettempdir())
    sweep(store, re.escape(FOLDER), own=True)
    path = store / folder_name(FOLDER)
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True)
class _Outcome:
    """How extract_shard ended: exit code, seconds, and its last words."""

    code: int
    seconds: float
    text: str


def _run(trial: Trial, gpus: int | None) -> _Outcome:
    """Run extract_shard in a process of its own, its output into this one's log."""
    settings = json.dumps(trial.config.model_dump(mode="json"))
    command = [
        sys.executable, "-m", "draftsmith", "extract-shard", "--settings", settings, "--config", settings,
        "--target", str(trial.folder / "target.json"), "--rows", str(trial.folder / "rows.parquet"),
        "--scatteritem", "1-of-1", "--manifest", str(trial.manifest), *([] if gpus is None else ["--gpus", str(gpus)]),
    ]  # fmt: skip
    begun = time.perf_counter()
    lines: deque[str] = deque(maxlen=_KEPT_LINES)
    with Termination() as termination:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        reader = threading.Thread(target=_pass_on, args=(process.stdout, lines), daemon=True)
        reader.start()
        try:
            while process.poll() is None and not termination.asked and time.perf_counter() - begun < _SECONDS:
                time.sleep(0.1)
            late = process.poll() is None and not termination.asked
        finally:
            _end(process)
    # A worker that outlives the driver may hold the pipe open.
    reader.join(5.0)
    if termination.asked:
        log(f"dry run: ended by {termination.name}")
        sys.exit(EXIT_TERMINATED)
    if late:
        lines.append(f"it was ended after {_SECONDS:.0f} s")
    return _Outcome(process.returncode, time.perf_counter() - begun, last_words(list(lines)))


def _pass_on(stream: IO[str] | None, lines: deque[str]) -> None:
    for line in stream or ():
        lines.append(line.rstrip("\n"))
        print(line, end="", file=sys.stderr, flush=True)


def _end(process: subprocess.Popen[str]) -> None:
    """End extract_shard and all that it started, if it still runs."""
    if process.poll() is not None:
        return
    started = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    try:
        process.wait(30.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in started:
        if child.is_running():
            child.kill()


def last_words(lines: Sequence[str]) -> str:
    """Of a program's last lines those that tell of its error: from the stage's own error on, or from the first traceback."""
    for pattern in (r"\d\d:\d\d:\d\d error: ", r"Traceback \(most recent call last\)"):
        found = [place for place, line in enumerate(lines) if re.match(pattern, line)]
        if found:
            return "\n".join(lines[found[0] :])
    return "\n".join(lines)


def hint(text: str) -> str:
    """What to do about a program that ended with these words; only what its errors say counts."""
    errors = "\n".join(line for line in text.splitlines() if re.search(r"Error\b|Exception\b|^it was ended", line))
    return next((mend for pattern, mend in _HINTS.items() if re.search(pattern, errors)), _NO_HINT)


def _extraction(trial: Trial, outcome: _Outcome) -> Found:
    if outcome.code != 0:
        return "fail", (
            f"ended after {outcome.seconds:.0f} s with exit code {outcome.code}, its traceback is above; {hint(outcome.text)} "
            "(preflight.dry_run: false goes on without a dry run)"
        )
    start = read_json(trial.manifest)["figures"].get("load_seconds")
    started = f", {start:.0f} s of them until the engine was ready" if isinstance(start, int | float) else ""
    return "ok", f"{trial.rows} rows, {trial.tokens:,} tokens in all, in {outcome.seconds:.0f} s{started}"


def _manifest(trial: Trial) -> dict[str, Any]:
    if not trial.manifest.is_file():
        raise Skip("left out: the extraction failed")
    return dict(read_json(trial.manifest))


def _reading(trial: Trial) -> Found:
    figures = _manifest(trial)["figures"]
    return (
        "ok",
        f"{figures['method']}, layers {trial.layers} and the final state, on {str(figures['runner']).rsplit('.', 1)[-1]}",
    )


def _store(trial: Trial) -> Found:
    """Every row can be read as training reads it."""
    from draftsmith.store import StoreReader

    manifest = _manifest(trial)
    reader = StoreReader(Path(manifest["store"]), manifest["rows"])
    for row, ids in read_rows(trial.folder / "rows.parquet", ["row_id", "input_ids"]).itertuples(index=False):
        states = reader.row(row)
        if states.token_ids.tolist() != list(ids)[: len(states.token_ids)]:
            raise DraftsmithError(f"row {row} came back with other tokens; this is a fault of the workflow, report it")
        if not (bool(states.aux.isfinite().all()) and bool(states.final.isfinite().all())):
            raise DraftsmithError(
                f"row {row} came back with states that are no numbers; see engine.args and target.dtype"
            )
        shape = (*states.aux.shape[1:], *states.final.shape[1:])
    return (
        "ok",
        f"all rows were read back: {shape[0]} layers and the final state of width {shape[1]} in {str(states.final.dtype).removeprefix('torch.')}",
    )
