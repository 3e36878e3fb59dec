"""Finished conversations in part files that are complete or absent, and failures in a ledger beside them.

Names are unique and tell the time, so that two runs on one folder do not touch each other's files.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith.errors import DraftsmithError
from draftsmith.files import atomic_path, fsync_folder
from draftsmith.log import log

_SUFFIX = ".jsonl"


def _name(kind: str) -> str:
    # In order of time, however many runs write.
    return f"{kind}-{time.time_ns():020d}-{uuid.uuid4().hex[:12]}{_SUFFIX}"


class Journal:
    """The part files of one folder, which belongs to one target and one set of settings.

    Only where a record lies is kept in memory. A record is any JSON object with a text ``key``; of several with one key
    the earliest counts, so that an answer, once given out, stays the same.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places: dict[str, tuple[Path, int]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.glob(f"part-*{_SUFFIX}")):
            self._index(path)

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def add(self, records: Sequence[dict[str, Any]]) -> None:
        """Write ``records`` as one part file."""
        if not records:
            return
        path = self._folder / _name("part")
        with atomic_path(path) as temporary:
            temporary.write_text("".join(json.dumps(record) + "\n" for record in records))
        self._index(path)

    def get(self, key: str) -> dict[str, Any]:
        """The record of ``key``; KeyError if there is none."""
        path, start = self._places[key]
        with open(path, "rb") as part:
            part.seek(start)
            return dict(json.loads(part.readline()))

    def _index(self, path: Path) -> None:
        with open(path, "rb") as part:
            start = 0
            for number, line in enumerate(part, 1):
                try:
                    key = str(json.loads(line)["key"])
                except (ValueError, KeyError, TypeError) as error:
                    raise DraftsmithError(
                        f"{path}, line {number}: damaged ({type(error).__name__}: {error}); delete the file, and what was "
                        "answered in it is asked again"
                    ) from None
                self._places.setdefault(key, (path, start))
                start += len(line)


class Ledger:
    """Failures as JSON lines, one file a run, which stays when a later run succeeds; made with the first failure."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / _name("failed")
        self.entries: list[dict[str, Any]] = []

    def add(self, entry: dict[str, Any]) -> None:
        """Write a failure down at once."""
        new = not self.entries
        self.entries.append(entry)
        with open(self.path, "a") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")
        if new:
            fsync_folder(self.path.parent)

    def show(self) -> None:
        """Name the failures, the last with its traceback, and where the others are."""
        if self.entries:
            last = self.entries[-1]
            log(
                f"regenerate: {len(self.entries)} conversations failed, each with its traceback in {self.path}; the last is "
                f"{last['conversation_id']}, turn {last['turn']}: {last['error']}\n{last['traceback'].rstrip()}"
            )
