"""The whole list: every check is made and shown, whichever fails."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from looked_at import Make

from draftsmith import preflight
from draftsmith.config import parse
from draftsmith.errors import DraftsmithError
from draftsmith.preflight.checks import CHECKS, before_regeneration

pytest.importorskip("vllm")


def run(
    make: Make, tmp_path: Path, rows: Sequence[Sequence[int]] = ([1, 2, 3], [4, 5]), **settings: Any
) -> dict[str, Any]:
    subject = make(rows=rows, settings=settings)
    (tmp_path / "target.json").write_text(json.dumps(subject.target))
    (tmp_path / "tokenize.json").write_text(json.dumps(subject.tokenised))
    report = tmp_path / "preflight.json"
    preflight.run(
        subject.config, target=tmp_path / "target.json", rows=subject.rows, tokenize_report=tmp_path / "tokenize.json", gpus=0, report=report,
    )  # fmt: skip
    return dict(json.loads(report.read_text()))


def test_a_sound_run_passes(make: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = run(make, tmp_path)
    assert made["verdict"] == "ok"
    assert {check["name"]: check["status"] for check in made["checks"]} == dict.fromkeys(CHECKS, "ok")
    assert 0 <= made["seconds"] < 60
    shown = capfd.readouterr().err
    for check in made["checks"]:
        assert f" preflight: ok    {check['name']} " in shown


def test_without_a_row_one_check_says_so(make: Make, tmp_path: Path) -> None:
    with pytest.raises(DraftsmithError) as error:
        run(make, tmp_path, rows=[])
    assert str(error.value) == (
        f"preflight: row lengths: {tmp_path}/rows.parquet: holds no rows; run the stage tokenize again, and look into its report"
    )


def test_every_check_is_shown_when_some_fail(make: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "failed-preflight.json").write_text("{}")
    with pytest.raises(DraftsmithError) as error:
        run(make, tmp_path, target={"layers": [1, 3, 7]}, engine={"args": {"quantisation": "fp8"}})
    lines = str(error.value).splitlines()
    assert len(lines) == 2, "one sentence a failed check"
    assert lines[0].startswith("preflight: layers: target.layers: [7] lie outside")
    assert lines[1].startswith("preflight: engine arguments: vLLM ")
    assert not (tmp_path / "preflight.json").exists()
    kept = json.loads((tmp_path / "failed-preflight.json").read_text())
    assert kept["verdict"] == "fail"
    statuses = {check["name"]: check["status"] for check in kept["checks"]}
    assert list(statuses) == list(CHECKS)
    assert {name for name, status in statuses.items() if status == "fail"} == {"layers", "engine arguments"}
    assert {name for name, status in statuses.items() if status == "skip"} == {"reading", "draft", "store"}
    assert "preflight: FAIL  layers " in capfd.readouterr().err
    run(make, tmp_path)
    assert not (tmp_path / "failed-preflight.json").exists(), "it is of an earlier run"


TARGET: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_layers": 6, "vocab_size": 320, "torch_dtype": "float32",
}  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"target": {"layers": [1, 3, 99]}}, r"target\.layers: \[99\] lie outside"),
        ({"vocabulary": {"size": 321}}, r"vocabulary\.size is 321, the target has 320 tokens"),
        ({"extract": {"store": "/proc/nope/store"}}, r"/proc/nope/store: cannot be written .*extract\.store"),
        ({"target": {"layers": [1, 3], "dtype": "float16"}}, r"target\.dtype float16"),
    ],
)
def test_what_needs_no_rows_is_told_before_they_are_generated(settings: dict[str, Any], said: str) -> None:
    values = {"target": {"layers": [1, 3, 5]}, "vocabulary": {"size": 100}} | settings
    target = TARGET | ({"model_type": "deepseek_v3"} if "dtype" in settings.get("target", {}) else {})
    with pytest.raises(DraftsmithError, match=said):
        before_regeneration(parse(values, "test"), target)
