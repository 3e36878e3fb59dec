"""The command ``draftsmith``: one sub-command a stage, as the rules call them, each also by hand; and ``draftsmith store``.

Only what a stage needs is imported, when it is called, so that help and dry runs answer at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from draftsmith import __version__, config
from draftsmith.errors import DraftsmithError
from draftsmith.store import commands as store_commands

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
app.add_typer(store_commands.app, name="store")

Settings = Annotated[str, typer.Option(help="JSON text with sections of the config, or a config file's path.")]
Whole = Annotated[
    str,
    typer.Option(
        "--config", envvar="DRAFTSMITH_CONFIG", help="The whole config; only what changes no result is taken from it."
    ),
]
Input = Annotated[Path, typer.Option(help="Input file.", dir_okay=False)]
Output = Annotated[Path, typer.Option(help="Output file.", dir_okay=False)]
Work = Annotated[Path, typer.Option(help="Folder for what makes the stage resumable.", file_okay=False)]
Gpus = Annotated[int | None, typer.Option(help="GPUs that the scheduler granted.")]


# How something is done, not what: changing them re-runs nothing, so they are no part of a rule's params.
_HOW = ("engine", "preflight", "clean")


def _config(settings: str, whole: str = "") -> config.Config:
    parsed = config.settings(settings)
    if whole:
        given = config.settings(whole)
        for section in _HOW:
            setattr(parsed, section, getattr(given, section))
    if parsed.engine.device == "cpu":
        # Everything that asks for the hardware, torch and vLLM among them, is to find none.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return parsed


def _use_only(granted: int | None) -> None:
    """Hide GPUs beyond those granted: a scheduler on one machine counts them but does not number them."""
    from draftsmith import hardware

    visible = [gpu.index for gpu in hardware.gpus()]
    if granted is not None and granted < len(visible):
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[:granted])
        hardware.gpus.cache_clear()


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command()
def get_target(settings: Settings, cache: Work, target: Output) -> None:
    """Bring the target model to this machine and describe it."""
    from draftsmith import get_target as stage

    stage.run(_config(settings), cache=cache, target=target)


@app.command()
def regenerate(
    settings: Settings,
    target: Input,
    workdir: Work,
    conversations: Output,
    report: Output,
    whole: Whole = "",
    gpus: Gpus = None,
) -> None:
    """Let the target write the answers of the conversations anew."""
    from draftsmith import clean_gpus as cleaning
    from draftsmith import engine as vllm_engine
    from draftsmith import regenerate as stage
    from draftsmith.files import read_json
    from draftsmith.preflight.checks import before_regeneration

    parsed = _config(settings, whole)
    vllm_engine.check_granted(parsed, gpus)
    before_regeneration(config.settings(whole or settings), read_json(target))
    cleaning.check(parsed)
    stage.run(parsed, target=target, workdir=workdir, conversations=conversations, report=report)


@app.command()
def tokenize(
    settings: Settings,
    target: Input,
    rows: Output,
    prompts: Output,
    report: Output,
    conversations: Annotated[
        Path | None, typer.Option(help="Regenerated conversations, instead of the config's.")
    ] = None,
) -> None:
    """Turn conversations into token rows with supervised spans."""
    from draftsmith import tokenize as stage

    stage.run(_config(settings), target=target, conversations=conversations, rows=rows, prompts=prompts, report=report)


@app.command()
def preflight(
    settings: Settings,
    target: Input,
    rows: Input,
    tokenize_report: Input,
    report: Output,
    whole: Whole = "",
    gpus: Gpus = None,
) -> None:
    """Check in seconds, without weights, what would fail after minutes."""
    from draftsmith import preflight as stage

    stage.run(
        _config(settings, whole), target=target, rows=rows, tokenize_report=tokenize_report, gpus=gpus, report=report
    )


@app.command()
def dry_run(
    settings: Settings, target: Input, rows: Input, report: Output, whole: Whole = "", gpus: Gpus = None
) -> None:
    """Take four rows through the whole extraction, with few layers of dummy weights."""
    from draftsmith import dry_run as stage

    # It looks at the GPUs itself, as most of it is left out where no dry run is wanted.
    stage.run(_config(settings, whole), target=target, rows=rows, gpus=gpus, report=report)


@app.command()
def clean_gpus(report: Output, whole: Whole = "") -> None:
    """Look for processes on the granted GPUs, and end orphans of this workflow if the config says so."""
    from draftsmith import clean_gpus as stage

    stage.run(_config("{}", whole), report=report)


@app.command()
def extract_shard(
    settings: Settings,
    target: Input,
    rows: Input,
    scatteritem: Annotated[str, typer.Option(help="Which shard, as 1-of-2.")],
    manifest: Output,
    whole: Whole = "",
    gpus: Gpus = None,
) -> None:
    """Extract the hidden states of one shard into the store."""
    from draftsmith import clean_gpus as cleaning
    from draftsmith import extract_shard as stage

    parsed = _config(settings, whole)
    cleaning.check(parsed)
    stage.run(parsed, target=target, rows=rows, scatteritem=scatteritem, gpus=gpus, manifest=manifest)


@app.command()
def merge_manifest(rows: Input, manifest: Output, shards: list[Path]) -> None:
    """Join the shards' manifests."""
    from draftsmith import merge_manifest as stage

    stage.run(rows=rows, shards=shards, manifest=manifest)


@app.command()
def map_vocabulary(
    settings: Settings, target: Input, rows: Input, tokenize_report: Input, vocabulary: Output, report: Output
) -> None:
    """Choose the tokens of the draft vocabulary."""
    from draftsmith import map_vocabulary as stage

    stage.run(
        _config(settings),
        target=target,
        rows=rows,
        tokenize_report=tokenize_report,
        vocabulary=vocabulary,
        report=report,
    )


@app.command()
def train_draft(
    settings: Settings,
    target: Input,
    rows: Input,
    manifest: Input,
    vocabulary: Input,
    workdir: Work,
    draft: Output,
    report: Output,
    whole: Whole = "",
    gpus: Gpus = None,
) -> None:
    """Train the draft."""
    from draftsmith import clean_gpus as cleaning
    from draftsmith import train_draft as stage

    parsed = _config(settings, whole)
    _use_only(gpus)
    cleaning.check(parsed)
    stage.run(
        parsed,
        target=target,
        rows=rows,
        manifest=manifest,
        vocabulary=vocabulary,
        workdir=workdir,
        draft=draft,
        report=report,
    )


@app.command()
def export_draft(
    settings: Settings,
    target: Input,
    draft: Input,
    vocabulary: Input,
    train_report: Input,
    folder: Work,
    report: Output,
) -> None:
    """Write the draft as vLLM loads it."""
    from draftsmith import export_draft as stage

    stage.run(
        _config(settings),
        target=target,
        draft=draft,
        vocabulary=vocabulary,
        train_report=train_report,
        folder=folder,
        report=report,
    )


@app.command()
def evaluate_draft(
    settings: Settings,
    target: Input,
    draft: Work,
    vocabulary: Input,
    prompts: Input,
    workdir: Work,
    report: Output,
    whole: Whole = "",
    gpus: Gpus = None,
) -> None:
    """Serve the draft beside its target and measure the acceptance length."""
    from draftsmith import clean_gpus as cleaning
    from draftsmith import engine as vllm_engine
    from draftsmith import evaluate_draft as stage

    parsed = _config(settings, whole)
    vllm_engine.check_granted(parsed, gpus)
    cleaning.check(parsed)
    stage.run(
        parsed, target=target, draft=draft, vocabulary=vocabulary, prompts=prompts, workdir=workdir, report=report
    )


@app.command()
def report(
    settings: Settings,
    results: Work,
    benchmarks: Work,
    page: Output,
    rulegraph: Annotated[Path | None, typer.Option(help="The workflow's graph, as Mermaid text.")] = None,
    whole: Whole = "",
) -> None:
    """Draw everything that was measured on one page."""
    from draftsmith import report as stage

    stage.run(
        config.settings(whole or settings), results=results, benchmarks=benchmarks, rulegraph=rulegraph, page=page
    )


def main() -> None:
    """Run a stage; a :class:`DraftsmithError` is told in its own words, anything else with its whole traceback."""
    # Before torch is imported: a thread that waits for the others must not spin on a core that another program needs. One
    # such program, however light, makes training and prefill several times slower otherwise; alone they lose a tenth.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    call: Callable[..., object] = app
    try:
        call()
    except DraftsmithError as error:
        from draftsmith.log import log

        log(f"error: {error}")
        sys.exit(1)
    except Exception:
        import traceback

        from draftsmith.log import log

        # To the terminal as well, where the rule's log is another file.
        log(f"error: {traceback.format_exc()}")
        sys.exit(1)
