"""The head of a batch file: read, and checked against all that it must agree with."""

from __future__ import annotations

import errno
import json
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from draftsmith.store.format import (
    FORMAT_VERSION,
    BatchHeader,
    DamagedFile,
    OtherFormat,
    StoreError,
    UnreadableFile,
    batch_name,
    checksum,
    layout,
)


def read_metadata(file: BinaryIO, path: Path) -> tuple[dict[str, Any], bytes]:
    """What the file at ``path``, open as ``file``, says of itself, in any format version, and its head as it lies there.

    Raises :class:`DamagedFile` when it is no batch file, :class:`UnreadableFile` when it cannot be read.
    """
    try:
        start = file.read(8)
        (size,) = struct.unpack("<Q", start)
        text = file.read(min(size, 1 << 28))
        metadata = json.loads(text)["__metadata__"]
        written = metadata["draftsmith"]
        # Format 1 had no checksum here.
        if metadata.get("xxh3", "") not in ("", checksum(written.encode())):
            raise DamagedFile(f"{path}: its head does not have its checksum")
        values = json.loads(written)
        if not isinstance(values["format"], int):
            raise TypeError
        return values, start + text
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, struct.error, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFile(f"{path}: is no readable batch file ({type(error).__name__})") from error


def read_head(file: BinaryIO, path: Path) -> tuple[BatchHeader, dict[str, tuple[int, int]]]:
    """As :func:`read_header`, of a file that is open already: what is read next is then of the same file, whatever has taken
    its name in the meantime.
    """
    values, found = read_metadata(file, path)
    if values["format"] != FORMAT_VERSION:
        raise OtherFormat(f"{path}: has format {values['format']}, this version reads {FORMAT_VERSION}")
    try:
        header = BatchHeader.model_validate(values)
        head, places = layout(header)
    except (ValidationError, KeyError) as error:
        raise DamagedFile(f"{path}: is no readable batch file ({type(error).__name__})") from error
    expected, actual = max(at + size for at, size in places.values()), os.fstat(file.fileno()).st_size
    if actual != expected:
        raise DamagedFile(f"{path}: is {actual} bytes long and should be {expected}")
    if found != head:
        raise DamagedFile(f"{path}: its head is not what its writer wrote")
    return header, places


def open_file(path: Path) -> BinaryIO:
    """Open a batch file for reading.

    Raises :class:`FileNotFoundError` when it is gone, :class:`UnreadableFile` when it cannot be opened, which is no damage.
    """
    try:
        return open(path, "rb")
    except FileNotFoundError:
        raise
    except IsADirectoryError as error:
        raise DamagedFile(f"{path}: is a folder") from error
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> UnreadableFile:
    """What an error of the operating system says of ``path``, with the mend: it tells of the machine, not of the content."""
    told = error.strerror or type(error).__name__
    if isinstance(error, PermissionError):
        return UnreadableFile(
            f"{path}: may not be read ({told}); let its owner make the store readable for all who share it"
        )
    if error.errno in (errno.EMFILE, errno.ENFILE):
        mend = "raise the limit of open files (ulimit -n), or name fewer threads"
    elif error.errno == errno.ENOMEM:
        mend = "give the job more memory"
    else:
        mend = f"look after its disk or file server, or, if it never can be read, move it to {path.parent / '.damaged'}"
    return UnreadableFile(f"{path}: cannot be read ({told}); {mend}, and run the same command again")


def read_header(path: Path) -> tuple[BatchHeader, dict[str, tuple[int, int]]]:
    """Read and check the head of a batch file, and for each tensor its first byte and size; the states are not read.

    Raises :class:`StoreError`: :class:`DamagedFile` when the file is cut short, has bytes too many, a damaged head, or is
    no batch file, :class:`OtherFormat` when another version wrote it, and :class:`UnreadableFile` when it cannot be read.
    """
    try:
        with open_file(path) as file:
            return read_head(file, path)
    except FileNotFoundError:
        raise StoreError(f"{path}: is gone") from None


def check_belongs(header: BatchHeader, path: Path, key: str | None) -> None:
    """Raise :class:`DamagedFile` unless a file that says this of itself belongs to the fingerprint ``key`` and has its own name."""
    if key is not None and header.fingerprint != key:
        raise DamagedFile(f"{path}: belongs to the fingerprint {header.fingerprint}, not {key}")
    own = batch_name(header.rows)
    if path.name != own:
        raise DamagedFile(f"{path}: is the file {own} under another name")
