"""What ``draftsmith store`` shows to people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import rich.progress
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from draftsmith.store.audit import Audit
from draftsmith.store.inventory import Contents
from draftsmith.store.leftovers import Leftover
from draftsmith.store.verification import Lines
from draftsmith.terminal import console, size


class Progress:
    """Counts what has been read: a bar on a terminal, a line every ten seconds elsewhere."""

    def __enter__(self) -> Progress:
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        console = Console(stderr=True)
        self._bar = rich.progress.Progress(*columns, console=console, transient=True) if console.is_terminal else None
        return self

    def begin(self, files: int, size: int) -> None:
        """Reading begins: ``size`` bytes in ``files`` files."""
        self._lines = Lines(files, size)
        if self._bar is not None:
            self._bar.add_task("", total=size)
            self._bar.start()

    def add(self, size: int) -> None:
        """A file of ``size`` bytes has been read."""
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0], size)
        else:
            self._lines.add(size)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    made = Table(show_header=any(columns))
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in rows:
        # Text, as a path in brackets is no markup.
        made.add_row(*(Text(str(cell)) for cell in row))
    console().print(made)


def show_audit(found: Audit) -> None:
    """What reading a store brought: counts, what is damaged, what is missing, and the mend."""
    print(f"{found.store}: {found.files} files, {size(found.bytes)}, looked through in {found.seconds:.1f} s")
    _table(
        ("fingerprint", "sound files", "rows", "tokens", "size", "damaged or foreign", "of another format"),
        (
            (
                each.fingerprint,
                each.files,
                f"{each.rows:,}",
                f"{each.tokens:,}",
                size(each.bytes),
                len(each.damaged),
                each.other_format,
            )
            for each in found.fingerprints
        ),
    )
    for each in found.fingerprints:
        for reason in each.damaged.values():
            print(f"damaged: {reason}")
    if found.missing:
        print(
            f"{len(found.missing)} of {found.manifest_rows} rows of the manifest are missing, the first is {found.missing[0]}"
        )
    if not found.sound:
        print(
            "`snakemake --forcerun extract_shard` moves damaged files aside and computes their rows again, and no others"
        )
        return
    unread = sum(each.other_format for each in found.fingerprints)
    besides = f"; {unread} of another format version were not verified" if unread else ""
    there = "" if found.manifest_rows is None else f"all {found.manifest_rows} rows of the manifest are there, and "
    print(f"{there}every file is sound{besides}")


def show_stats(found: Sequence[Contents]) -> None:
    """A table for each fingerprint."""
    for each in found:
        print(each.fingerprint)
        _table(("", ""), _facts(each))


def _facts(each: Contents) -> Iterator[tuple[str, str]]:
    yield "target", (each.target or "?")[:16]
    yield "layers", f"{each.layers} and the final state, width {each.hidden_size}"
    stored = f"float8 with scales, read as {each.dtype}" if each.storage == "fp8" else str(each.dtype)
    yield "stored as", f"{stored}; format {', '.join(map(str, each.formats)) or '?'}"
    yield "files", f"{each.files}, {each.verified} of them verified; the newest of {each.newest or '?'}"
    yield "rows", f"{each.rows:,}" + (f", {each.duplicates:,} of them in two files or more" if each.duplicates else "")
    yield "tokens", f"{each.tokens:,}"
    yield "size", size(each.bytes)
    yield "bytes per token", f"{each.bytes_per_token or 0:,.1f} (states alone: {each.formula or 0:,})"
    yield "vLLM", ", ".join(each.vllm) or "?"
    for name, reason in each.unreadable.items():
        yield "unreadable", f"{name}: {reason}"
    for item in (*each.staging, *each.damaged):
        yield item.kind, f"{item.path.name}, {size(item.bytes)}, {item.note}"
    yield "errors on record", str(each.ledger)


def show_leftovers(store: Path, items: Sequence[Leftover], chosen: Sequence[Leftover], removed: bool) -> None:
    """What could go, what of it was asked for, and whether that is gone."""
    if not items:
        print(
            f"{store}: no staging folder, no damaged file, and no other fingerprint where --keep or --manifest says which is wanted"
        )
        return

    def fate(item: Leftover) -> str:
        if item in chosen:
            return "removed" if removed else "asked for"
        return "could go" if item.removable else "stays"

    _table(
        ("kind", "path", "size", "", "note"),
        (
            (
                item.kind,
                item.path.relative_to(store) if item.path != store and item.path.is_relative_to(store) else item.path,
                size(item.bytes),
                fate(item),
                item.note,
            )
            for item in items
        ),
    )
    total = size(sum(item.bytes for item in chosen))
    if removed:
        print(f"{len(chosen)} removed, {total} freed")
    elif chosen:
        print(f"{len(chosen)} asked for, {total}; nothing was removed: add --yes")
    else:
        print("nothing was removed: ask for --staging, --damaged, --fingerprint KEY or --others, and add --yes")
