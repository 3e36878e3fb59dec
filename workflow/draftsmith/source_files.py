"""Which files are conversations, by their endings; known to the Snakefile too, hence without a heavy import."""

from __future__ import annotations

from pathlib import Path

ENDINGS = (".jsonl", ".jsonl.gz", ".ndjson", ".json", ".parquet")
"""Endings of the files that a data source may be."""


def within(folder: Path) -> list[Path]:
    """The files of ``folder`` and of the folders in it that are read as conversations, by name; links that lead nowhere too.

    What is hidden is not, nor what lies in a hidden folder: notebooks and caches keep copies of data there.
    """
    return sorted(
        file
        for file in folder.rglob("*")
        if file.name.endswith(ENDINGS)
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
        and not file.is_dir()
    )
