"""The room that a store needs is that of the rows as they will be stored."""

from __future__ import annotations

import shutil
from collections import namedtuple

import pandas as pd
import pytest
from looked_at import Make

from draftsmith.preflight import machine


@pytest.mark.parametrize(("supervised_only", "tokens"), [(False, 20), (True, 12)])
def test_tokens_behind_the_last_answer_are_not_counted(
    make: Make, monkeypatch: pytest.MonkeyPatch, supervised_only: bool, tokens: int
) -> None:
    """Two rows of ten tokens, cut to 10 and 2; a token takes four states of 64 numbers of four bytes."""
    subject = make(
        rows=[list(range(10)), list(range(20, 30))], settings={"extract": {"supervised_only": supervised_only}}
    )
    table = pd.read_parquet(subject.rows)
    table["span_ends"] = [[10], [2]]
    table.to_parquet(subject.rows)
    usage = namedtuple("usage", "total used free")
    need = int(tokens * (4 * 64 * 4 + 4) * 1.01) + (64 << 20)
    for free, status in ((need, "ok"), (need - 1, "fail")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage(free, 0, free))
        assert machine.store_room(subject)[0] == status
