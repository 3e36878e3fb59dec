"""The command ``draftsmith``: one sub-command a stage, as the rules call them, each also by hand; and ``draftsmith store``.

Only what a stage needs is imported, when it is called, so that help and dry runs answer at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from draftsmith import __version__, config, progress_file
from draftsmith.errors import DraftsmithError
from draftsmith.log import of_shard
from draftsmith.store import commands as store_commands

_HELP = "One command a stage of the workflow, as its rules call them; and estimate, status, look and store for people."

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=_HELP)
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
Folder = Annotated[Path, typer.Option(help="Folder of an earlier stage's files.", file_okay=False)]
Gpus = Annotated[int | None, typer.Option(help="GPUs that the scheduler granted.")]


_RATES = (
    "NAME=NUMBER, as extract=42000. In tokens/s: extract of each shard's engine, on all its GPUs; train of each training process, "
    "which has one GPU, whatever the TTT steps; tokenize of the job; regenerate, in tokens of answers, of each shard's engine "
    "or of all servers; evaluate and evaluate_draft, in tokens of answers, of all requests together without and with the draft. In seconds: "
    "load, a start of an engine with its weights."
)

# How something is done, not what: changing them re-runs nothing, so they are no part of a rule's params.
_HOW = ("engine", "preflight", "clean")


def _config(settings: str, whole: str = "") -> config.Config:
    parsed = config.settings(settings)
    if whole:
        given = config.settings(whole, "--config")
        for section in _HOW:
            setattr(parsed, section, getattr(given, section))
        how = {key: getattr(given.regenerate, key) for key in config.Regenerate.HOW}
        parsed.regenerate = parsed.regenerate.model_copy(update=how)
    if parsed.engine.device == "cpu":
        # Everything that asks for the hardware, torch and vLLM among them, is to find none.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return parsed


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command()
def get_target(settings: Settings, cache: Work, target: Output, whole: Whole = "") -> None:
    """Bring the target model to this machine and describe it."""
    from draftsmith import get_target as stage

    # Were layer ids a param of the rule, others would have everything made anew.
    given = config.settings(whole, "--config") if whole else None
    stage.run(_config(settings), cache=cache, target=target, whole=given)


@app.command()
def regenerate(
    settings: Settings,
    target: Input,
    workdir: Work,
    scatteritem: Annotated[str, typer.Option(help="Which shard, as 1-of-2.")],
    report: Output,
    whole: Whole = "",
    gpus: Gpus = None,
) -> None:
    """Let the target write the answers of one shard of the conversations anew."""
    from draftsmith import regenerate as stage
    from draftsmith.files import read_json
    from draftsmith.gpus import gpu_job
    from draftsmith.preflight.checks import before_regeneration

    of_shard(scatteritem)
    parsed = _config(settings, whole)
    served = bool(parsed.regenerate.endpoints)
    if not served:
        gpu_job.begin(parsed, gpus)
    before_regeneration(config.settings(whole or settings), read_json(target))
    stage.run(parsed, target=target, workdir=workdir, scatteritem=scatteritem, report=report)


@app.command()
def merge_answers(
    settings: Settings, target: Input, workdir: Work, conversations: Output, report: Output, shards: list[Path]
) -> None:
    """Join the answers of all shards to conversations."""
    from draftsmith import merge_answers as stage

    stage.run(
        _config(settings), target=target, workdir=workdir, shards=shards, conversations=conversations, report=report
    )


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
    workdir: Annotated[
        Path | None, typer.Option(help="Folder for what conversations were made into; unset: nothing is kept.")
    ] = None,
) -> None:
    """Turn conversations into token rows with supervised spans."""
    from draftsmith import tokenize as stage
    from draftsmith import tokenizers_alone

    tokenizers_alone.load()
    stage.run(
        _config(settings),
        target=target,
        conversations=conversations,
        rows=rows,
        prompts=prompts,
        report=report,
        workdir=workdir,
    )


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
    from draftsmith.gpus import gpu_job

    parsed = _config(settings, whole)
    # The draft to come is looked at as well; were it a param, another learning rate would have everything checked and merged anew.
    given = config.settings(whole or settings)
    parsed.train, parsed.export, parsed.vocabulary = given.train, given.export, given.vocabulary
    gpu_job.number(parsed, gpus, parsed.engine.tp)
    stage.run(parsed, target=target, rows=rows, tokenize_report=tokenize_report, gpus=gpus, report=report)


@app.command()
def dry_run(
    settings: Settings, target: Input, rows: Input, report: Output, whole: Whole = "", gpus: Gpus = None
) -> None:
    """Take four rows through the whole extraction, with few layers of dummy weights."""
    from draftsmith import dry_run as stage

    # It looks at the GPUs itself, as most of it is left out where no dry run is wanted.
    stage.run(_config(settings, whole), target=target, rows=rows, gpus=gpus, report=report)


@app.command()
def clean_gpus(report: Output, whole: Whole = "", gpus: Gpus = None) -> None:
    """Look for processes on the granted GPUs, and end orphans of this workflow if the config says so."""
    from draftsmith import clean_gpus as stage
    from draftsmith.gpus import gpu_job

    parsed = _config(whole or "{}", whole)
    gpu_job.number(parsed, gpus, parsed.engine.tp)
    stage.run(parsed, report=report)


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
    from draftsmith import extract_shard as stage
    from draftsmith.gpus import gpu_job

    of_shard(scatteritem)
    parsed = _config(settings, whole)
    gpu_job.begin(parsed, gpus)
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
def look(
    target: Input,
    rows: Input,
    page: Annotated[Path, typer.Option("--page", "--out", help="The page to draw.", dir_okay=False)],
    settings: Settings = "{}",
    tokenize_report: Annotated[Path | None, typer.Option(help="tokenize.json, for reasons and counts.")] = None,
    vocabulary_report: Annotated[Path | None, typer.Option(help="vocabulary.json, for the coverage by size.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="The evaluation's prompts, for the mix.")] = None,
    report: Annotated[Path | None, typer.Option(help="Where to write the figures as JSON.", dir_okay=False)] = None,
    seed: Annotated[int, typer.Option(help="Another seed shows other rows.")] = 0,
) -> None:
    """Draw rows with their masks, domains and languages on a page, to be looked at before anything is extracted."""
    from draftsmith import look as stage

    parsed = _config(settings)
    # By hand, with no run that has a name, the page bears the file's.
    stage.run(
        parsed if "name" in parsed.model_fields_set else parsed.model_copy(update={"name": str(rows)}),
        target=target,
        rows=rows,
        tokenize_report=tokenize_report,
        vocabulary_report=vocabulary_report,
        prompts=prompts,
        report=report,
        page=page,
        seed=seed,
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
    nodes: Annotated[int, typer.Option(help="Nodes of the Slurm job, among which the GPUs are shared.", min=1)] = 1,
) -> None:
    """Train the draft."""
    from draftsmith import train_draft as stage
    from draftsmith.gpus import gpu_job
    from draftsmith.train_draft import nodes as spread

    parsed = _config(settings, whole)
    mine = spread.per_node(gpus, nodes)
    if nodes > 1 and not spread.is_node():
        spread.run_on_nodes(nodes, mine)
        return
    if nodes > 1 and spread.is_rank():
        spread.follow_torchrun()
    else:
        gpu_job.begin_training(parsed, mine)
        if nodes > 1:
            spread.become_torchrun(nodes)
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
    draft: Folder,
    vocabulary: Input,
    prompts: Input,
    workdir: Work,
    report: Output,
    whole: Whole = "",
    gpus: Gpus = None,
) -> None:
    """Serve the draft beside its target and measure the acceptance length."""
    from draftsmith import evaluate_draft as stage
    from draftsmith.gpus import gpu_job

    parsed = _config(settings, whole)
    gpu_job.begin(parsed, gpus)
    stage.run(
        parsed, target=target, draft=draft, vocabulary=vocabulary, prompts=prompts, workdir=workdir, report=report
    )


@app.command()
def gate(evaluation: Input, page: Input, verdict: Output) -> None:
    """Fail when the served acceptance length is below evaluate.min_acceptance_length."""
    from draftsmith import gate as stage

    stage.run(evaluation=evaluation, page=page, verdict=verdict)


@app.command()
def report(
    settings: Settings,
    results: Folder,
    benchmarks: Folder,
    page: Output,
    rulegraph: Annotated[Path | None, typer.Option(help="The workflow's graph, as Mermaid text.")] = None,
    whole: Whole = "",
) -> None:
    """Draw everything that was measured on one page."""
    from draftsmith import report as stage

    stage.run(
        config.settings(whole or settings), results=results, benchmarks=benchmarks, rulegraph=rulegraph, page=page
    )


@app.command()
def estimate(
    config_file: Annotated[Path, typer.Option("--config", help="The config file of the run.", dir_okay=False)],
    results: Annotated[
        Path | None, typer.Option(help="results/NAME with rows and rates of the run, if any; left out: the config's.")
    ] = None,
    measured: Annotated[Path | None, typer.Option(help="results/NAME of an earlier run, whose speed is taken.")] = None,
    rate: Annotated[list[str] | None, typer.Option(help=_RATES)] = None,
    rates: Annotated[Path | None, typer.Option(help="The same in a YAML file.", exists=True, dir_okay=False)] = None,
    target: Annotated[
        Path | None, typer.Option(help="A folder with the target's config.json, where the config's is not here.")
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Rows, where they are not to be estimated.")] = None,
    row_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of each of these rows.")] = None,
    device: Annotated[Literal["auto", "cuda", "cpu"], typer.Option(help="Where it will run.")] = "auto",
    gpu_gib: Annotated[float | None, typer.Option(min=1, help="Memory of a GPU in GiB, where none is here.")] = None,
    shards: Annotated[
        int | None, typer.Option(min=1, help="Engines that answer and extract side by side; left out: the profile's.")
    ] = None,
    profile: Annotated[
        Literal["local", "slurm"] | None, typer.Option(help="Whose; left out: slurm where a cluster answers.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Tell in seconds, without weights, what a run will need: bytes, files, memory, hours, each with its formula."""
    from draftsmith import estimate as view
    from draftsmith.estimate import slurm

    asked = view.Asked(
        config=config_file,
        results=results,
        measured=measured,
        target=target,
        rates=rate or (),
        rates_file=rates,
        rows=rows,
        row_tokens=row_tokens,
        device=device,
        gpu_gib=gpu_gib,
        shards=shards,
        profile=profile or ("slurm" if slurm.here() else "local"),
    )
    view.run(asked, as_json=as_json)


@app.command()
def status(
    results: Annotated[
        Path | None,
        typer.Option(help="results/NAME; left out: the run here that was written to last.", file_okay=False),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it anew until the run is over; Ctrl-C leaves.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks of --watch.")] = 3.0,
) -> None:
    """Tell how far a run is, from any terminal: it only reads the run's files."""
    from draftsmith import status as view

    view.run(results, watch=watch, as_json=as_json, every=every)


def main() -> None:
    """Run a stage; a :class:`DraftsmithError` is told in its own words, anything else with its whole traceback."""
    # Before torch is imported: a thread that waits for the others must not spin on a core that another program needs. One
    # such program, however light, makes training and prefill several times slower otherwise; alone they lose a tenth.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    call: Callable[..., object] = app
    try:
        with progress_file.watched(sys.argv[1:]):
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
