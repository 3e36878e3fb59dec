"""The graph of the rules, what each of them took, and the checks before the first load."""

from __future__ import annotations

from draftsmith.report.benchmarks import Job
from draftsmith.report.dag import Box, Graph
from draftsmith.report.data import REPORTS, Gathered
from draftsmith.report.model import Bar, Cell, Detail, Link, Notice, Section, Table
from draftsmith.report.sections import checks
from draftsmith.report.stages import BY_NAME
from draftsmith.report.values import Shown, count, dig, duration, listing, missing, shown, size, text, total

# Stages whose results are checks.
_CHECKED = {"preflight": "Preflight", "dry_run": "Dry run"}
_JOINED = {"regenerate": "merge_answers", "extract_shard": "merge_manifest"}
_UNMEASURED = "the rule has no benchmark file"
_UNSAMPLED = "Snakemake took no sample: the job was too short, or the system does not tell"


def section(gathered: Gathered, graph: Graph) -> Section:
    """Time and bytes of each stage, and the checks before the first load."""
    made = Section(
        "workflow",
        "Workflow",
        "A box is a rule; its file in workflow/rules/, its command and its Python module bear the same name. Edges "
        "that a longer way implies are left out.",
    )
    made.tables = [_stages(gathered, graph)]
    for stage, title in _CHECKED.items():
        _checked(gathered, stage, title, made)
    ended = listing(gathered.of("clean_gpus"), "ended")
    if ended:
        made.notices.append(
            Notice(
                "warn",
                "What an earlier run had left on the GPUs was ended:",
                [f"process {dig(holder, 'pid')}: {dig(holder, 'command')}" for holder in ended],
            )
        )
    return made


def box(gathered: Gathered, name: str) -> Box:
    """How a rule's box looks."""
    stage = BY_NAME.get(name)
    jobs = gathered.benchmarks.of(name)
    seconds = gathered.benchmarks.seconds(name)
    # What a shard wrote is told of by what joins it; of a rule that is not known, nothing can be said against it.
    source = _JOINED.get(name, name)
    done = source in gathered.reports or source not in REPORTS or (name == "extract_shard" and bool(gathered.shards))
    if seconds is not None:
        below = duration(seconds) + (f" · {len(jobs)} jobs" if len(jobs) > 1 else "")
    else:
        below = "this page" if name == "report" else "time not measured" if done else "no results"
    return Box(below, f"#{stage.section}" if stage else None, stage.what if stage else "", done)


def _stages(gathered: Gathered, graph: Graph) -> Table:
    measured = gathered.benchmarks
    known = [name for name in BY_NAME if name in graph] + sorted(name for name in graph if name not in BY_NAME)
    names = [name for name in known if name not in ("report", "gate")]
    longest = max((measured.seconds(name) or 0 for name in names), default=0)
    rows: list[list[Cell]] = []
    for name in names:
        jobs, seconds = measured.of(name), measured.seconds(name)
        stage = BY_NAME.get(name)
        rows.append(
            [
                Link(name, f"#{stage.section}") if stage else name,
                count(len(jobs)) if jobs else missing(_UNMEASURED),
                Bar(shown(seconds, duration, _UNMEASURED), seconds / longest if seconds and longest else 0.0),
                _sampled(jobs, total([job.cpu_seconds for job in jobs]), duration),
                _sampled(jobs, max((job.peak_bytes for job in jobs if job.peak_bytes is not None), default=None), size),
                _sampled(jobs, total([job.read_bytes for job in jobs]), size),
                _sampled(jobs, total([job.written_bytes for job in jobs]), size),
                shown(
                    gathered.on_disk(name),
                    size,
                    "no results" if name in BY_NAME else "the rule is not known to this page",
                ),
            ]
        )
    every = [job for jobs in measured.jobs.values() for job in jobs]
    summed: list[Cell] = [
        "Sum",
        count(len(every)) if every else missing("no benchmark file was found"),
        shown(measured.seconds(), duration, "no benchmark file was found"),
        _sampled(every, total([job.cpu_seconds for job in every]), duration),
        "",
        _sampled(every, total([job.read_bytes for job in every]), size),
        _sampled(every, total([job.written_bytes for job in every]), size),
        shown(total([gathered.on_disk(name) for name in names]), size, "no results"),
    ]
    return Table(
        "Time and bytes by stage",
        ["Stage", "Jobs", "Wall time", "CPU time", "Peak memory", "Read", "Written", "Results"],
        rows,
        note="From Snakemake's benchmark files, each of the last run of its job: what an earlier, interrupted run took is "
        "not in it. Wall and CPU time are summed over a stage's jobs, which may have run side by side; peak memory is the "
        "largest job's, all its processes together. Read and written: bytes that reached storage. Results: files on disk "
        "now; of extract_shard, the store's batch files.",
        total=summed,
    )


def _sampled(jobs: list[Job], value: float | None, form: object) -> Shown:
    return shown(value, form, _UNSAMPLED if jobs else _UNMEASURED)  # type: ignore[arg-type]


def _checked(gathered: Gathered, stage: str, title: str, made: Section) -> None:
    """Add the table of a stage that checks, what it warned of, and the tracebacks behind its failures."""
    report = gathered.of(stage)
    made_checks = listing(report, "checks")
    made.tables += checks.tables(f"{title}: {text(dig(report, 'verdict'), '')}", made_checks, REPORTS[stage])
    remarks = [check for check in made_checks if dig(check, "status") in ("warn", "fail")]
    if remarks:
        failed = any(dig(check, "status") == "fail" for check in remarks)
        made.notices.append(
            Notice(
                "fail" if failed else "warn",
                f"The {title.lower()} had something to say:",
                [f"{dig(check, 'name')}: {dig(check, 'detail')}" for check in remarks],
            )
        )
    for check in made_checks:
        trace = dig(check, "traceback")
        if isinstance(trace, str):
            made.details.append(Detail(f"{title}, {dig(check, 'name')}: what was raised", trace))
