"""Raw rows of JSONL, JSON and Parquet files, folders of them, and hub data sets, one at a time."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from draftsmith.config import Source
from draftsmith.conversations import hub
from draftsmith.errors import DraftsmithError
from draftsmith.files import at_home
from draftsmith.source_files import ENDINGS, within


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row as it was read: ``value`` is usually a dict; ``file`` and ``place`` (such as 'line 7') tell where it lies.

    Of a line that cannot be read, ``fault`` says why.
    """

    file: str
    place: str
    value: Any
    fault: str = ""

    @property
    def where(self) -> str:
        """File and place in words, as every message has them."""
        return f"{self.file}, {self.place}"

    def named(self, source: str) -> str:
        """What the row is called, if it has no id of its own: `FILE:NUMBER`, with ``source`` as the config writes its path.

        Of a source that is a folder, FILE goes on with the way to the file in it.
        """
        return f"{_called(source, self.file)}:{self.place.rsplit(' ', 1)[-1]}"


@lru_cache(maxsize=1)
def _called(source: str, file: str) -> str:
    if file == source:
        return source
    try:
        way = Path(file).relative_to(at_home(source))
    except ValueError:
        return source
    return str(Path(source) / way) if way.parts else source


def read_source(source: Source, index: int) -> Iterator[RawRow]:
    """The rows of ``data.sources[index]`` in a fixed order: files by name, rows as they lie; the first ``limit`` only.

    A line that cannot be read is a row with a fault. Raises :class:`DraftsmithError` naming the file that cannot be read
    at all, or not any further.
    """
    key = f"data.sources[{index}]"
    if source.path.startswith(hub.PREFIX):
        rows = (
            RawRow(source.path, f"row {number}", _without_nulls(value))
            for number, value in enumerate(hub.rows(source, key), 1)
        )
    else:
        path = at_home(source.path)
        aside = aside_mend(source)
        rows = (row for file in files(path, f"{key}.path") for row in _readable(file, aside))
    return islice(rows, source.limit)


def aside_mend(source: Source) -> str:
    """The end of a sentence about a file that holds no data: in a folder it may be there for something else."""
    in_folder = not source.path.startswith(hub.PREFIX) and at_home(source.path).is_dir()
    return "; if it is none of the data, move it out of the folder, or name the files" if in_folder else ""


def default_domain(source: Source) -> str:
    """Domain of rows that name none, where the source names none either: the file's or data set's own name."""
    if source.path.startswith(hub.PREFIX):
        return hub.parts(source.path)[0].rsplit("/", 1)[-1]
    name = Path(source.path).name
    return next((name.removesuffix(suffix) for suffix in ENDINGS if name.endswith(suffix)), name) or "default"


def files(path: Path, key: str) -> list[Path]:
    """The files of a local source, which the config's ``key`` names, by name; raises :class:`DraftsmithError` where there are none."""
    if path.is_dir():
        found = within(path)
        if not found:
            raise DraftsmithError(f"{path}: the folder that {key} names holds no {', '.join(ENDINGS)} files")
        for file in found:
            _check_link(file)
        return found
    _check_link(path)
    if not path.is_file():
        raise DraftsmithError(f"{path}: no such file; {key} must name a file or folder of conversations, or hub:ID")
    if not path.name.endswith(ENDINGS):
        raise DraftsmithError(f"{path}: of no known kind; {key} must end in one of {', '.join(ENDINGS)}")
    return [path]


def _check_link(file: Path) -> None:
    if file.is_symlink() and not file.exists():
        raise DraftsmithError(f"{file}: a link to {file.readlink()}, which is not there; mend the link or remove it")


def _readable(file: Path, aside: str) -> Iterator[RawRow]:
    try:
        yield from _from_file(file, aside)
    except OSError as error:
        raise DraftsmithError(
            f"{file}: could not be read ({error.strerror or error}); check its permissions and its disk"
        ) from error


def _from_file(file: Path, aside: str) -> Iterator[RawRow]:
    if file.name.endswith(".parquet"):
        return _parquet(file)
    if file.name.endswith(".json") and _starts_with_list(file):
        return _json_list(file)
    if not file.name.endswith(".gz") and _is_one_object(file):
        raise DraftsmithError(
            f"{file}: one JSON object over several lines, neither a list nor JSON lines; write the conversations as a list, "
            f"or each of them on one line{aside}"
        )
    # Many data sets call JSON lines .json.
    return _json_lines(file)


def _starts_with_list(file: Path) -> bool:
    with open(file, "rb") as opened:
        head = opened.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    return head.startswith(b"[")


def _is_one_object(file: Path) -> bool:
    """Whether the file is a single JSON object of several lines; it is read whole only where its first line breaks off."""
    with open(file, "rb") as opened:
        first = opened.readline().removeprefix(b"\xef\xbb\xbf").strip()
        if not first.startswith(b"{"):
            return False
        try:
            json.loads(first)
        except (ValueError, RecursionError):
            rest = opened.read()
        else:
            return False
    try:
        # Strings may not hold line breaks, so that a line which breaks off within one is not mended by the next.
        return bool(rest.strip()) and isinstance(json.loads(first + b"\n" + rest), dict)
    except (ValueError, RecursionError):
        return False


def _json_lines(file: Path) -> Iterator[RawRow]:
    opener = gzip.open if file.name.endswith(".gz") else open
    if file.name.endswith(".gz") and not _starts_as_gzip(file):
        raise DraftsmithError(f"{file}: not compressed by gzip; take .gz off its name, or fetch or write it again")
    with opener(file, "rb") as lines:
        number = 0
        try:
            for number, line in enumerate(lines, 1):
                if stripped := line.removeprefix(b"\xef\xbb\xbf").strip():
                    yield RawRow(str(file), f"line {number}", *_parse(stripped))
        except (gzip.BadGzipFile, EOFError, zlib.error):
            raise DraftsmithError(
                f"{file}: the compressed file is damaged after line {number}; fetch or write it again"
            ) from None


def _starts_as_gzip(file: Path) -> bool:
    with open(file, "rb") as opened:
        return opened.read(2) in (b"\x1f\x8b", b"")


def _parse(line: bytes) -> tuple[Any, str]:
    """The value of a line, or None and why there is none."""
    try:
        return json.loads(line.decode()), ""
    except UnicodeDecodeError as error:
        return None, f"not valid UTF-8 at byte {error.start + 1} of the line"
    except RecursionError:
        return None, "nested too deeply to be a conversation"
    except json.JSONDecodeError as error:
        if b"\0" in line:
            return None, "not valid UTF-8 (it has zero bytes, as UTF-16 does)"
        return None, f"not valid JSON ({error.msg} at column {error.colno})"
    except ValueError as error:
        return None, f"not valid JSON ({error})"


def _json_list(file: Path) -> Iterator[RawRow]:
    try:
        rows = json.loads(file.read_bytes())
    except UnicodeDecodeError as error:
        raise DraftsmithError(f"{file}: not valid UTF-8 at byte {error.start + 1}; save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise DraftsmithError(
            f"{file}, line {error.lineno}: not valid JSON ({error.msg} at column {error.colno}); mend the file or write it as JSONL"
        ) from None
    except RecursionError:
        raise DraftsmithError(
            f"{file}: nested too deeply to be conversations; mend the file or write it as JSONL"
        ) from None
    except ValueError as error:
        reason = str(error).partition(";")[0]
        raise DraftsmithError(f"{file}: not valid JSON ({reason}); mend the file or write it as JSONL") from None
    for number, value in enumerate(rows, 1):
        yield RawRow(str(file), f"row {number}", value)


def _parquet(file: Path) -> Iterator[RawRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(file) as opened:
            for batch in opened.iter_batches(batch_size=256):
                for value in batch.to_pylist():
                    number += 1
                    yield RawRow(str(file), f"row {number}", _without_nulls(value))
    except (pa.ArrowException, OSError, ValueError) as error:
        # Damage shows as any of them: in the pages as OSError, in texts as UnicodeDecodeError.
        if isinstance(error, OSError) and error.errno:
            raise
        reason = " ".join(str(error).split())
        raise DraftsmithError(
            f"{file}: not readable as Parquet after row {number} ({reason}); fetch or write it again"
        ) from None


def _without_nulls(value: Any) -> Any:
    # Columnar files give every struct the keys of all its siblings, null where the row had none.
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value
