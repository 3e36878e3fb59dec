"""Finished conversations in part files that are complete or absent, found again by the key of what was asked."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith.files import atomic_path

_SUFFIX = ".jsonl"


class Journal:
    """The part files of one folder, which belongs to one target and one set of settings.

    Only where a record lies is kept in memory. A record is any JSON object with a text ``key``.
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
        path = self._folder / f"part-{uuid.uuid4().hex}{_SUFFIX}"
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
            for line in part:
                self._places[json.loads(line)["key"]] = (path, start)
                start += len(line)
