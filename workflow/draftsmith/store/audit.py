"""Reads a whole store: every file against its checksums, and every row of a manifest at its place."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel

from draftsmith.errors import DraftsmithError
from draftsmith.files import read_json
from draftsmith.store.format import SUFFIX, BatchHeader, DamagedFile, OtherFormat
from draftsmith.store.inventory import folders
from draftsmith.store.verification import Journal, examine_all, identity


class Counter(Protocol):
    """Is told how far the reading has come."""

    def begin(self, files: int, size: int) -> None:
        """``files`` files of ``size`` bytes are going to be read."""

    def add(self, size: int) -> None:
        """One of ``size`` bytes has been read."""


class Verified(BaseModel):
    """The folder of one fingerprint. Rows, tokens and bytes are those of its sound files."""

    fingerprint: str
    files: int = 0
    rows: int = 0
    tokens: int = 0
    bytes: int = 0
    damaged: dict[str, str] = {}
    """Reason by file name; foreign files are among them."""
    other_format: int = 0
    """Files of another format version, which this program cannot verify."""


class Audit(BaseModel):
    """What reading a store brought."""

    store: str
    fingerprints: list[Verified]
    files: int = 0
    """Files that were read."""
    bytes: int = 0
    seconds: float = 0.0
    manifest_rows: int | None = None
    """Rows of the manifest; None without one."""
    missing: list[str] = []
    """Rows of the manifest that are not at their place in a sound file."""
    sound: bool = True


def audit(store: Path, manifest: Path | None, threads: int, progress: Counter) -> Audit:
    """Read every file of every fingerprint in ``store``.

    Sound files are noted in the journal as verified, damaged ones as damaged, so that the next extraction looks at them
    again; nothing is moved. Raises :class:`draftsmith.errors.DraftsmithError` when ``store`` is none, the manifest is
    none, or a file may not be read.
    """
    begun = time.monotonic()
    places = None if manifest is None else _places(manifest)
    files = {folder: sorted(folder.glob(f"*{SUFFIX}")) for folder in folders(store)}
    made = Audit(store=str(store), fingerprints=[], files=sum(map(len, files.values())))
    made.bytes = sum(_size(path) for paths in files.values() for path in paths)
    progress.begin(made.files, made.bytes)
    sound: dict[str, dict[str, BatchHeader]] = {}
    for folder, paths in files.items():
        each = Verified(fingerprint=folder.resolve().name)
        made.fingerprints.append(each)
        sound[each.fingerprint] = _read(folder, paths, each, threads, progress)
    if places is not None:
        there = sound.get(places["fingerprint"], {})
        made.manifest_rows = len(places["rows"])
        made.missing = [row for row, place in places["rows"].items() if not _holds(there, row, place, places)]
    made.seconds = round(time.monotonic() - begun, 2)
    made.sound = not made.missing and not any(each.damaged for each in made.fingerprints)
    return made


def _places(manifest: Path) -> dict[str, Any]:
    """The manifest's content, of which ``fingerprint`` is a text and ``rows`` gives file and place of each row."""
    values = read_json(manifest)
    rows = values.get("rows") if isinstance(values, dict) else None
    if not isinstance(rows, dict) or not isinstance(values.get("fingerprint"), str):
        raise DraftsmithError(f"{manifest}: is no manifest; name results/NAME/extract/manifest.json")
    for row, place in rows.items():
        if not isinstance(place, list) or [type(part) for part in place] != [str, int]:
            raise DraftsmithError(
                f"{manifest}: the place of row {row} is {place!r} and should be a file and a number; run merge_manifest again"
            )
    return values


def _size(path: Path) -> int:
    try:
        return identity(path).size
    except FileNotFoundError:
        # An extraction that is running has moved it aside.
        return 0


def _read(folder: Path, paths: list[Path], each: Verified, threads: int, progress: Counter) -> dict[str, BatchHeader]:
    journal, sound = Journal(folder), dict[str, BatchHeader]()
    known = journal.read()
    for verdict in examine_all(paths, each.fingerprint, threads):
        progress.add(verdict.seen.size)
        if verdict.header is not None:
            if (verdict.path.name, verdict.seen) not in known:
                journal.add(verdict.path, verdict.seen)
            sound[verdict.path.name] = verdict.header
            each.bytes += verdict.seen.size
        elif isinstance(verdict.error, DamagedFile):
            journal.distrust(verdict.path, verdict.seen)
            each.damaged[verdict.path.name] = str(verdict.error)
        elif isinstance(verdict.error, OtherFormat):
            each.other_format += 1
        elif verdict.error is not None:
            raise verdict.error
    each.files = len(sound)
    each.rows = len({row for header in sound.values() for row in header.rows})
    each.tokens = sum(header.tokens for header in sound.values())
    return sound


def _holds(there: dict[str, BatchHeader], row: str, place: list[Any], manifest: dict[str, Any]) -> bool:
    header = there.get(place[0])
    if header is None or not 0 <= int(place[1]) < len(header.rows):
        return False
    # A row that was cut has an id of its own in the store.
    return bool(manifest.get("supervised_only")) or header.rows[int(place[1])] == row
