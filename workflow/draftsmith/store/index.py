"""What a folder of the store holds: found again by what the files say of themselves, whoever wrote them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from draftsmith.log import log
from draftsmith.store.format import SUFFIX, BatchHeader, DamagedFile, OtherFormat, StoreError, UnreadableFile
from draftsmith.store.head import check_belongs, open_file, read_head
from draftsmith.store.verification import Identity, Journal, Lines, examine_all, identity, move_aside

# A head is small: on a network file system the wait for it is all that costs.
_THREADS = 8


@dataclass
class StoreIndex:
    """Rows that the folder of a fingerprint holds, and the files that were passed over, with the reason."""

    rows: dict[str, tuple[str, int]]
    """File name and place in the file of each row."""
    tokens: dict[str, int]
    """Length of each row."""
    bad: dict[str, str]
    """Reason by file name, a sentence."""

    def add(self, name: str, header: BatchHeader) -> None:
        """Take up the rows of a file; a row that another file holds as well stays where it was found first."""
        for place, (row, length) in enumerate(zip(header.rows, header.lengths, strict=True)):
            self.rows.setdefault(row, (name, place))
            self.tokens[row] = length


@dataclass(frozen=True)
class Head:
    """A file of the folder: its header, or why it has none that counts."""

    path: Path
    seen: Identity
    header: BatchHeader | None
    error: StoreError | None


def heads(folder: Path, key: str | None) -> Iterator[Head]:
    """The heads of all batch files in ``folder``, in the order of their names; files of another fingerprint than ``key`` have none."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="draftsmith-scan") as pool:
        found = pool.map(lambda path: _head(path, key), sorted(folder.glob(f"*{SUFFIX}")))
        yield from (head for head in found if head is not None)


def _head(path: Path, key: str | None) -> Head | None:
    try:
        seen = identity(path)
        try:
            with open_file(path) as file:
                header, _ = read_head(file, path)
            check_belongs(header, path, key)
        except StoreError as error:
            return Head(path, seen, None, error)
        return Head(path, seen, header, None)
    except FileNotFoundError:
        # Another process has moved it aside.
        return None


def scan(folder: Path, key: str) -> StoreIndex:
    """Read the head of every batch file in ``folder``; files of another fingerprint or broken ones are listed as bad.

    Quick, and blind to damage of the states themselves: what is to be used goes through :func:`trusted`. Raises
    :class:`UnreadableFile` when a file cannot be read, as :func:`trusted` would.
    """
    index = StoreIndex({}, {}, {})
    for head in heads(folder, key):
        if isinstance(head.error, UnreadableFile):
            raise head.error
        if head.header is None:
            index.bad[head.path.name] = f"{head.error}; it is ignored and its rows are computed again"
        else:
            index.add(head.path.name, head.header)
    return index


def trusted(folder: Path, key: str, wanted: Iterable[str]) -> StoreIndex:
    """As :func:`scan`, of verified files alone: each row in the result may be used.

    Files that hold rows of ``wanted`` are read and compared with their checksums, in a few threads, unless the journal names
    them with the size and times that they have; other files are left alone and are not in the result unless the journal
    names them. Damaged and foreign files are moved to ``.damaged``, each with a line of log, and listed as bad: their rows
    are missing. Raises :class:`StoreError` when a file may not be read, or cannot be moved.
    """
    found = list(heads(folder, key))
    journal = Journal(folder)
    known, rows = journal.read(), set(wanted)
    index = StoreIndex({}, {}, {})
    good: dict[str, BatchHeader] = {}
    todo: list[Head] = []
    for head in found:
        if head.header is None:
            # Looked at again, as another process may be putting a good file in its place.
            todo.append(head)
        elif (head.path.name, head.seen) in known:
            good[head.path.name] = head.header
        elif not rows.isdisjoint(head.header.rows):
            todo.append(head)
    lines = Lines(len(todo), sum(head.seen.size for head in todo))
    for verdict in examine_all([head.path for head in todo], key):
        if verdict.header is not None:
            good[verdict.path.name] = verdict.header
            journal.add(verdict.path, verdict.seen)
        elif isinstance(verdict.error, DamagedFile | OtherFormat):
            reason = f"{verdict.error}; it is moved to {move_aside(verdict.path, str(verdict.error), verdict.seen)} and its rows are computed again"
            log(f"store: {reason}")
            index.bad[verdict.path.name] = reason
        elif verdict.error is not None:
            raise verdict.error
        lines.add(verdict.seen.size)
    for name in sorted(good):
        index.add(name, good[name])
    return index
