"""What is reused has been verified: files against their checksums, a journal of those that were, and damage put aside.

Whoever meets a damaged or foreign file, the next extraction or training, moves it to ``.damaged`` in its folder, where nobody
reads it again: nothing is deleted, its rows count as missing, and the next extraction computes them.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import xxhash

from draftsmith.log import log
from draftsmith.store.format import CHECKED, BatchHeader, DamagedFile, StoreError
from draftsmith.store.head import check_belongs, open_file, read_head, unreadable

DAMAGED = ".damaged"
VERIFIED = ".verified"
THREADS = 4
"""Readers at once: what a network file system takes to be busy; the checksums are faster than any disk."""
_PIECE = 8 << 20
_LOG_SECONDS = 10.0


class Identity(NamedTuple):
    """What the file system says of a file's content: it changes when the file is written again, replaced or copied."""

    size: int
    mtime_ns: int
    # Nobody can set it, so that a copy which keeps names and times (cp -a, rsync -a) is told from what was verified, and a file
    # server gives all hosts the same. Not the device, whose number differs from host to host, nor the inode: freshly made file
    # systems, filled in the same order, give files the same ones, and some (FUSE, CIFS) give others each time.
    ctime_ns: int


def identity(path: Path) -> Identity:
    """Size in bytes of a file, and times of the last change of its content and of anything about it.

    Raises :class:`FileNotFoundError` when it is gone, :class:`UnreadableFile` when the file system does not tell.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error
    return Identity(status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class Journal:
    """Files of a fingerprint's folder that were published or verified, so that the next run need not read them again.

    Each process appends to a file of its own, ``.verified/HOST-PID.jsonl``: lines with a file's name, size, mtime_ns and
    ctime_ns. A file counts as long as it has all of them still. What changes on the disk without a trace in them is found by training, which
    compares each row, or by ``draftsmith store verify``, which notes it here as damaged.
    """

    def __init__(self, folder: Path) -> None:
        """``folder`` is that of the fingerprint."""
        self.folder = folder / VERIFIED
        self._lock = threading.Lock()
        self._begun = False

    def add(self, path: Path, seen: Identity | None = None) -> None:
        """Note a file as verified: as it is now, or as it was ``seen`` before it was read."""
        self._write({"name": path.name, **(seen or identity(path))._asdict()})

    def distrust(self, path: Path, seen: Identity) -> None:
        """Note a file as damaged, whatever was noted of it before."""
        self._write({"name": path.name, **seen._asdict(), "damaged": True})

    def _write(self, entry: dict[str, object]) -> None:
        file = self.folder / f"{socket.gethostname()}-{os.getpid()}.jsonl"
        with self._lock:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                with open(file, "ab") as lines:
                    # A killed process of the same number may have left half a line.
                    lines.write((b"" if self._begun else b"\n") + json.dumps(entry).encode() + b"\n")
            except OSError as error:
                if not self._begun:
                    log(f"{file}: cannot be written ({error.strerror}); files are verified anew by the next run")
            self._begun = True

    def read(self) -> set[tuple[str, Identity]]:
        """Names of the files that need not be verified, each with the identity for which that holds."""
        good: set[tuple[str, Identity]] = set()
        damaged: set[tuple[str, Identity]] = set()
        for line in self._lines():
            try:
                entry = json.loads(line)
                known = (str(entry["name"]), Identity(*(int(entry[name]) for name in Identity._fields)))
            except (ValueError, KeyError, TypeError):
                # Half a line, or one of an older version, which noted less.
                continue
            (damaged if entry.get("damaged") else good).add(known)
        return good - damaged

    def _lines(self) -> Iterator[bytes]:
        for file in sorted(self.folder.glob("*.jsonl")):
            try:
                yield from file.read_bytes().splitlines()
            except OSError as error:
                # Another user's, or one that has just been removed; which files are damaged is found by reading them.
                log(f"{file}: cannot be read ({error.strerror}); files that it alone names are verified anew")


def verify(path: Path, key: str | None = None) -> BatchHeader:
    """Read all of a batch file and compare every byte with what its header says.

    Raises :class:`DamagedFile` when a byte differs, or when the file belongs to another fingerprint than ``key`` or has
    another file's name; :class:`UnreadableFile` when it cannot be read, :class:`FileNotFoundError` when it is gone.
    """
    with open_file(path) as file:
        header, places = read_head(file, path)
        check_belongs(header, path, key)
        try:
            _compare(file, path, header, places)
        except OSError as error:
            raise unreadable(path, error) from error
    return header


def _compare(file: BinaryIO, path: Path, header: BatchHeader, places: dict[str, tuple[int, int]]) -> None:
    starts = [0]
    for length in header.lengths:
        starts.append(starts[-1] + length)
    if _read(file, path, *places["offsets"]) != struct.pack(f"<{len(starts)}q", *starts):
        raise DamagedFile(f"{path}: its offsets do not follow from the lengths of its rows")
    ids = _read(file, path, *places["token_ids"])
    for row, start, end in zip(header.rows, starts, starts[1:], strict=False):
        if hashlib.sha256(ids[4 * start : 4 * end]).hexdigest()[:32] != row:
            raise DamagedFile(f"{path}: the token ids of row {row} are not its own")
    sums = [xxhash.xxh3_64() for _ in header.rows]
    piece = memoryview(bytearray(_PIECE))
    # Tensor after tensor, so that the file is read from one end to the other.
    for at, size in (places[name] for name in CHECKED if name in places):
        each = size // starts[-1]
        file.seek(at)
        for place, length in enumerate(header.lengths):
            left = length * each
            while left:
                part = piece[: min(left, _PIECE)]
                if file.readinto(part) != len(part):  # type: ignore[attr-defined]
                    raise DamagedFile(f"{path}: ends before its last state")
                sums[place].update(part)
                left -= len(part)
    for row, found, noted in zip(header.rows, sums, header.checksums, strict=True):
        if found.hexdigest() != noted:
            raise DamagedFile(f"{path}: the states of row {row} do not have their checksum")


def _read(file: BinaryIO, path: Path, at: int, size: int) -> bytes:
    file.seek(at)
    found = file.read(size)
    if len(found) != size:
        raise DamagedFile(f"{path}: ends before its last state")
    return found


@dataclass(frozen=True)
class Verdict:
    """What became of verifying a file: its header, or the error."""

    path: Path
    seen: Identity
    header: BatchHeader | None
    error: StoreError | None


def examine(path: Path, key: str | None = None) -> Verdict | None:
    """Verify a file without raising; None when it is gone, as another process may have moved or replaced it."""
    try:
        while True:
            seen = identity(path)
            try:
                return Verdict(path, seen, verify(path, key), None)
            except StoreError as error:
                # Another process may have put a good file of the same name in its place.
                if identity(path) == seen:
                    return Verdict(path, seen, None, error)
    except FileNotFoundError:
        return None


def examine_all(paths: Sequence[Path], key: str | None = None, threads: int = THREADS) -> Iterator[Verdict]:
    """Verify files in a few threads; verdicts come as they are reached, files that are gone are left out."""
    pool = ThreadPoolExecutor(max(1, min(threads, len(paths))), thread_name_prefix="draftsmith-verify")
    try:
        futures: list[Future[Verdict | None]] = [pool.submit(examine, path, key) for path in paths]
        for future in as_completed(futures):
            verdict = future.result()
            if verdict is not None:
                yield verdict
    finally:
        pool.shutdown(cancel_futures=True)


def move_aside(path: Path, reason: str, seen: Identity | None = None) -> Path | None:
    """Move a damaged file to ``.damaged`` in its folder, with a text beside it that says why.

    Gives its new place; None when it is gone, or, with ``seen``, when another file has taken its name. Raises
    :class:`StoreError` when it cannot be moved.
    """
    folder = path.parent / DAMAGED
    try:
        if seen is not None and identity(path) != seen:
            return None
        folder.mkdir(exist_ok=True)
        aside = folder / path.name
        if aside.exists():
            # Nothing is ever overwritten here.
            aside = folder / f"{path.stem}.{time.time_ns()}{path.suffix}"
        path.rename(aside)
        aside.with_suffix(".txt").write_text(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {reason}\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"{reason}, and it cannot be moved to {folder} ({error.strerror}); move it there") from error
    return aside


class Lines:
    """A line of log every ten seconds while files are verified."""

    def __init__(self, files: int, size: int) -> None:
        self.files, self.bytes = files, size
        self.done_files = self.done_bytes = 0
        self.begun = self._last = time.monotonic()

    def add(self, size: int) -> None:
        """Count a file of ``size`` bytes that has been read, and print the line if it is time."""
        self.done_files += 1
        self.done_bytes += size
        now = time.monotonic()
        if now - self._last >= _LOG_SECONDS:
            self._last = now
            rate = self.done_bytes / (now - self.begun)
            log(
                f"store: verified {self.done_files} of {self.files} files, {self.done_bytes / 1e9:.1f} of "
                f"{self.bytes / 1e9:.1f} GB at {rate / 1e9:.2f} GB/s, about {(self.bytes - self.done_bytes) / rate:.0f} s left"
            )
