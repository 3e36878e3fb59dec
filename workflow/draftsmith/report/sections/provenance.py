"""Where everything comes from: target, states, versions, machine, settings."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import yaml

import draftsmith
from draftsmith.config import Config
from draftsmith.report.data import Gathered
from draftsmith.report.model import Cell, Detail, Fact, Section, Table
from draftsmith.report.values import Shown, count, dig, listing, missing, number, shown, size, text, yes

_PACKAGES = ("draftsmith", "vllm", "torch", "transformers", "snakemake", "plotly")
_UNKNOWN = "not in target.json"


def section(gathered: Gathered) -> Section:
    """Everything that a stranger needs to run it again."""
    made = Section("provenance", "Provenance")
    made.facts = _facts(gathered)
    made.tables = [_versions(gathered), _hardware(gathered)]
    made.details = [_config(gathered.config)]
    return made


def _facts(gathered: Gathered) -> list[Fact]:
    target, manifest = gathered.of("get_target"), gathered.of("merge_manifest")
    unknown = gathered.absent.get("get_target", _UNKNOWN)
    remote = dig(target, "trust_remote_code")
    return [
        Fact("Target", text(dig(target, "source"), unknown)),
        Fact(
            "Revision",
            text(
                dig(target, "revision"),
                "none: a local folder or a package, whose files the fingerprint covers" if target else unknown,
            ),
        ),
        Fact(
            "Target fingerprint",
            text(dig(target, "fingerprint"), unknown),
            "SHA-256 over config, tokenizer files and a sample of every tensor",
        ),
        Fact("Architecture", text(", ".join(map(str, listing(target, "architectures"))) or None, unknown)),
        Fact("Size", Shown(_shape(gathered)) if _shape(gathered) else missing(unknown)),
        Fact("Checkpoint's precision", text(dig(target, "torch_dtype"), unknown)),
        Fact(
            "Captured layers",
            text(", ".join(map(str, listing(target, "layers"))) or None, unknown),
            "k = the residual stream that enters layer k",
        ),
        Fact("Remote code trusted", shown(remote if isinstance(remote, bool) else None, yes, unknown)),
        Fact("Precision of the states", text(dig(manifest, "dtype"), "not in extract/manifest.json")),
        Fact(
            "Store fingerprint",
            text(dig(manifest, "fingerprint"), "not in extract/manifest.json"),
            "over target, layers, precision and format",
        ),
        Fact(
            "Chat template",
            text(dig(gathered.of("tokenize"), "template_sha256"), "not in tokenize/tokenize.json"),
            "SHA-256",
        ),
        Fact(
            "Training fingerprint",
            text(dig(gathered.of("train_draft"), "fingerprint"), "not in train/train.json"),
            "over settings, rows, states and vocabulary",
        ),
        Fact("Commit of the workflow", commit(Path(draftsmith.__file__))),
    ]


def _shape(gathered: Gathered) -> str:
    target = gathered.of("get_target")
    parts = (("num_layers", "layers"), ("hidden_size", "wide"), ("vocab_size", "tokens in the vocabulary"))
    return ", ".join(f"{count(value)} {name}" for key, name in parts if (value := number(target, key)) is not None)


def commit(file: Path) -> Shown:
    """The git commit that ``file`` is tracked in, with a note when tracked files were changed since."""
    folder = file.resolve().parent
    outside = "the package does not run from a git checkout"
    if _git(folder, "ls-files", "--error-unmatch", file.name) is None:
        return missing(outside)
    head = _git(folder, "rev-parse", "HEAD")
    if head is None:
        return missing(outside)
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return Shown(head + (", with uncommitted changes" if changed else ""))


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _versions(gathered: Gathered) -> Table:
    served = dig(gathered.of("evaluate_draft"), "versions")
    rows: list[list[Cell]] = [
        [name, text(dig(served, name), "not recorded by evaluate_draft"), text(_installed(name), "not installed here")]
        for name in _PACKAGES
    ]
    rows.append(["python", text(dig(served, "python"), "not recorded by evaluate_draft"), platform.python_version()])
    return Table("Versions", ["Software", "At the evaluation", "At the drawing of this page"], rows, numeric=3)


def _installed(name: str) -> str | None:
    if name == "draftsmith":
        return draftsmith.__version__
    for package in (name, f"{name}-cpu"):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def _hardware(gathered: Gathered) -> Table:
    cleaned = gathered.of("clean_gpus")
    gpus = listing(cleaned, "gpus")
    granted = ", ".join(f"{dig(gpu, 'name')} ({_memory(number(gpu, 'total'))})" for gpu in gpus) if gpus else "none"
    rows: list[list[Cell]] = [
        [
            "GPUs granted",
            Shown(granted) if cleaned else missing(gathered.absent.get("clean_gpus", "no clean_gpus.json")),
        ],
        ["This page's machine", f"{platform.system()} {platform.release()}, {platform.machine()}"],
        ["Its processor", text(_processor(), "the system does not tell")],
        [
            "Its cores",
            count(len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else count(os.cpu_count() or 0),
        ],
    ]
    return Table(
        "Hardware",
        ["What", "Found"],
        rows,
        numeric=2,
        note="GPUs are those of the job of clean_gpus. On a cluster this page may be drawn on another machine than the "
        "other stages ran on.",
    )


def _memory(total: float | None) -> str:
    return size(total) if total is not None else "memory not known"


def _processor() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor() or None
    )


def _config(config: Config) -> Detail:
    # What was not given is no default of the run: a rule passes only the keys that its stage depends on.
    given = config.model_dump(mode="json", exclude_unset=True)
    return Detail(
        "Settings",
        yaml.safe_dump(given, sort_keys=False, allow_unicode=True),
        "The keys that were given to this stage; a key that is not listed was not, or was left at its default.",
    )
