"""Mixes of training and evaluation compared by hand, and what each reason code means."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import draftsmith
from draftsmith.config import Config
from draftsmith.report import data, reasons
from draftsmith.report.sections import left_out, mix


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"a": 3, "b": 1}, {"a": 6, "b": 2}, 0.0),
        ({"a": 3, "b": 1}, {"a": 1, "b": 1}, 0.25),
        # 0.5 of a, 0.5 of b against 0.25 of a, 0.75 of c: (0.25 + 0.5 + 0.75) / 2.
        ({"a": 1, "b": 1}, {"a": 1, "c": 3}, 0.75),
        ({"a": 1}, {"b": 5}, 1.0),
    ],
)
def test_distance_by_hand(one: dict[str, float], other: dict[str, float], expected: float) -> None:
    assert mix.distance(one, other) == pytest.approx(expected)


def test_a_warning_only_where_there_is_something_to_warn_of() -> None:
    assert mix.notices("domain", {"a": 60, "b": 40}, {"a": 5, "b": 5}, 1) == []
    assert mix.notices("domain", {"a": 60}, {}, 1) == []
    (apart,) = mix.notices("domain", {"a": 90, "b": 10}, {"a": 5, "b": 5}, 1)
    assert "(distance 0.40 of 1)" in apart.text
    (lacks,) = mix.notices("domain", {"a": 9}, {"a": 9, "b": 1, "und": 1}, 1)
    assert lacks.points == ["b: 1 prompts"]
    # A single prompt in another language may be a mistake of the detection.
    assert mix.notices("language", {"en": 9}, {"en": 9, "br": 1}, 2) == []


def section(folder: Path, content: dict[str, Any]) -> Any:
    (folder / "look").mkdir()
    (folder / "look" / "look.json").write_text(json.dumps(content))
    return mix.section(data.gather(Config(), folder, folder))


def test_the_charts_hold_the_shares(tmp_path: Path) -> None:
    content = {
        "by_domain": {"a": {"train": {"rows": 6}}, "b": {"train": {"rows": 2}, "validation": {"rows": 9}}},
        "prompts": {"a": 1, "c": 3},
        "languages": {"by": "py3langid", "counts": {"train": {"en": 8}, "evaluation": {"en": 3, "de": 1}}},
    }
    domains, spoken = section(tmp_path, content).charts
    assert domains.figure["data"][0]["y"] == ["a", "b", "c"]
    assert [trace["x"] for trace in domains.figure["data"]] == [[0.75, 0.25, 0], [0.25, 0, 0.75]]
    assert domains.table.rows[2] == ["c", "0", "0.0%", "3", "75.0%"]
    assert [trace["x"] for trace in spoken.figure["data"]] == [[1.0, 0], [0.75, 0.25]]


def test_of_many_domains_those_that_training_lacks_are_shown(tmp_path: Path) -> None:
    trained = {f"d{place:03}": {"train": {"rows": 1000 - place}} for place in range(300)}
    chart = section(tmp_path, {"by_domain": trained, "prompts": {"strange": 1, "d299": 1}}).charts[0]
    names = chart.figure["data"][0]["y"]
    assert names == [*(f"d{place:03}" for place in range(20)), "strange"]
    assert "The 21 of 301 that matter most." in chart.note


# ---- reasons ----


def test_every_reason_of_the_package_has_its_meaning_on_the_page() -> None:
    package = Path(draftsmith.__file__).parent
    owners = set()
    for path in package.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = node.targets if isinstance(node, ast.Assign) else []
            if any(isinstance(name, ast.Name) and name.id == "REASONS" for name in names):
                owners.add(".".join(path.relative_to(package).with_suffix("").parts).removesuffix(".__init__"))
    assert owners == {name for names in reasons.MODULES.values() for name in names}
    assert "tokenize.min_supervised_tokens" in reasons.meanings("tokenize")["too_short"]
    assert reasons.meanings("regenerate")["duplicate"] != reasons.meanings("tokenize")["duplicate"]


def test_reasons_are_told_with_meaning_example_and_share() -> None:
    report = {
        "conversations": 50, "dropped": {"unknown_role": 1, "new_code": 4}, "dropped_examples": {"unknown_role": "a.jsonl, line 7: 'x'"},
    }  # fmt: skip
    table = left_out.conversations(report, "tokenize", "Left out")
    assert table is not None
    first, second = table.rows
    assert [str(cell) for cell in first][0::2] == ["new_code", "", "8.0%"]
    assert table.reasons == ["no module of this version knows the code"]
    assert [str(cell) for cell in second] == [
        "unknown_role", reasons.meanings("tokenize")["unknown_role"], "a.jsonl, line 7: 'x'", "1", "2.0%",
    ]  # fmt: skip
