"""What users give the benchmarks on a command line: refused in one sentence, and never more removed than was made."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from draftsmith import hardware
from draftsmith.errors import DraftsmithError

MODULES = ("arguments", "variants", "prompts")


@pytest.fixture
def benchmarks(repo: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The modules; their folders go behind all others on the path, and off it again."""
    before = list(sys.path)
    found = {}
    for name in MODULES:
        monkeypatch.setattr(sys, "path", [*before, str(repo / "benchmarks/acceptance"), str(repo / "benchmarks")])
        found[name] = importlib.import_module(name)
    yield SimpleNamespace(**found)
    for name in MODULES:
        sys.modules.pop(name, None)


def test_lists_and_mappings(benchmarks: SimpleNamespace) -> None:
    made = benchmarks.arguments
    assert made.among(" ours,speculators,ours", ("ours", "speculators"), "--ways") == ["ours", "speculators"]
    assert made.numbers("3, 7", "--ttt-steps") == [3, 7]
    assert made.mapping('{"fc_norm": true}', "--train") == {"fc_norm": True}
    for call, text, said in (
        (lambda text: made.among(text, ("ours",), "--ways"), "ours,foo", "--ways: foo is none of ours"),
        (lambda text: made.among(text, ("ours",), "--ways"), ",", "--ways: ',' is none of ours"),
        (lambda text: made.numbers(text, "--lengths"), "64,", "no list of whole numbers above 0"),
        (lambda text: made.numbers(text, "--lengths"), "64,0", "no list of whole numbers above 0"),
        (lambda text: made.mapping(text, "--train"), "{", "--train: not valid JSON"),
        (lambda text: made.mapping(text, "--train"), "[]", "no JSON object"),
    ):
        with pytest.raises(typer.BadParameter) as refused:
            call(text)
        assert said in str(refused.value)


def test_a_folder_keeps_all_that_was_in_it(benchmarks: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "states").write_text("of somebody")
    with benchmarks.arguments.within(tmp_path) as first, benchmarks.arguments.within(tmp_path) as second:
        assert first != second
        (Path(first) / "own").write_text("of the call")
    assert [path.name for path in tmp_path.iterdir()] == ["states"]


def test_an_error_with_its_mend_is_told_without_a_traceback(
    benchmarks: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def main() -> None:
        raise DraftsmithError("do this instead")

    monkeypatch.setattr(sys, "argv", ["benchmark"])
    with pytest.raises(SystemExit) as left:
        benchmarks.arguments.run(main)
    assert left.value.code == "do this instead"


def test_a_variant_keeps_what_the_run_s_own_config_gives_the_engine(
    benchmarks: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its arguments of vLLM, on a GPU as well, where one is added; and the sections that it does not name at all."""
    monkeypatch.setattr(hardware, "device", lambda: "cuda")
    file = tmp_path / "my.yaml"
    file.write_text("name: mine\nengine: {tp: 2, args: {quantization: fp8}}\nevaluate: {k: 5, ks: [1, 2]}\n")
    made = benchmarks.variants.settings("fp8", file, {"train": {"epochs": 2}}, tmp_path / "fp8")
    assert (made.name, made.engine.tp, made.train.epochs, made.extract.storage) == ("mine", 2, 2, "fp8")
    assert made.engine.args == {"quantization": "fp8", "kv_cache_memory_bytes": 2 << 30}
    assert (made.evaluate.k, made.evaluate.ks, made.extract.store) == (5, [], str(tmp_path / "fp8/store"))
    with pytest.raises(DraftsmithError, match=r"my\.yaml with the variant plain: train\.epoch is no known key"):
        benchmarks.variants.settings("plain", file, {"train": {"epoch": 2}})
    file.write_text("")
    assert benchmarks.variants.settings("ttt-3", file, {}).train.ttt_steps == 3


def test_a_run_that_has_not_come_so_far_is_named_before_anything_is_trained(
    benchmarks: SimpleNamespace, tmp_path: Path
) -> None:
    (tmp_path / "target.json").write_text("{}")
    with pytest.raises(DraftsmithError, match=r"tokenize/rows\.parquet: no such file; give the folder .* as --run"):
        benchmarks.variants.check_results(tmp_path)


def test_no_half_of_the_prompts_is_written(
    benchmarks: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight prompts a domain to train on, and three held out; more than there are, or a system without time zones: no file."""
    folder = tmp_path / "ein Ordner"
    benchmarks.prompts.main(folder, 64, 3)
    lines = {path.name: [json.loads(line) for line in path.read_text().splitlines()] for path in folder.iterdir()}
    assert {name: len(found) for name, found in lines.items()} == {"train.jsonl": 64, "held-out.jsonl": 24}
    assert {each["split"] for each in lines["held-out.jsonl"]} == {"evaluation"}
    assert len({each["prompt"] for found in lines.values() for each in found}) == 88
    with pytest.raises(SystemExit, match="ask for fewer"):
        benchmarks.prompts.main(tmp_path / "none", 64, 2_000)
    monkeypatch.setattr(benchmarks.prompts.zoneinfo, "available_timezones", set)
    with pytest.raises(SystemExit, match=r"travel: this Python knows of no cities; .* tzdata"):
        benchmarks.prompts.main(tmp_path / "none", 64, 3)
    assert not (tmp_path / "none").exists()
