"""Times: the arithmetic by hand, the demo's real ones, and rates that are missing or wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from targets import DEMO, SMOLLM, config, given

from draftsmith.errors import DraftsmithError
from draftsmith.estimate import rates, training
from draftsmith.estimate.model import Rows, Time
from draftsmith.estimate.table import together
from draftsmith.estimate.times import Stages
from draftsmith.train_draft.plan import make_plan

_EARLIER, _LATER = DEMO["earlier"], DEMO["later"]


def run_folder(root: Path, run: dict[str, Any]) -> Path:
    """The files of a run that rates are read from."""
    results = root / "results" / "demo"
    for name, content in {
        "tokenize/tokenize.json": run["tokenize"], "extract/shards/1-of-1.json": {"figures": run["figures"], "rows": {}},
        "train/train.json": run["train"], "evaluate/evaluate.json": run["evaluate"],
    }.items():  # fmt: skip
        path = results / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    for name, seconds in run["seconds"].items():
        path = root / "benchmarks" / "rules" / "demo" / f"{name}.tsv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"s\th:m:s\tmax_rss\n{seconds}\t0:00:00\t1.0\n")
    return results


def rows(**more: Any) -> Rows:
    values: dict[str, Any] = {
        "how": "known", "explained": "", "rows": 10, "tokens": 42_000, "longest": 512, "training_tokens": 40_000, "supervised_tokens": 20_000,
        "prompts": 48, "conversations": 10,
    }  # fmt: skip
    return Rows(**values | more)


def stages(
    known: rates.Rates,
    told: Rows,
    *,
    shards: int = 1,
    world: int = 1,
    tokens: int = 120_000,
    gpus: int = 0,
    **sections: Any,
) -> dict[str, Time]:
    made = Stages(
        config(**sections),
        told,
        known,
        shards=shards,
        world=world,
        training_tokens=tokens,
        weights=500_000_000,
        gpus=gpus,
    )
    return {time.stage: time for time in made.every()}


@pytest.mark.parametrize("measured_in", [_EARLIER, _LATER])
def test_the_demos_real_times_within_a_quarter(tmp_path: Path, measured_in: dict[str, Any]) -> None:
    """By the rates of the run itself, and by those of an earlier one with half as many conversations."""
    known = rates.measured(run_folder(tmp_path, measured_in))
    lengths = [length for length, ours in zip(_LATER["lengths"], _LATER["training"], strict=True) if ours]
    plan = make_plan(lengths, 512, 0, 6, None, 1)
    assert plan.steps == pytest.approx(_LATER["train"]["steps"], rel=0.02)
    tokens = sum(lengths[row] for pack in plan.packs for row in pack)
    assert tokens == pytest.approx(_LATER["train"]["tokens"], rel=0.02)
    told = rows(tokens=sum(_LATER["lengths"]), prompts=_LATER["evaluate"]["prompts"])
    found = stages(known, told, tokens=tokens, evaluate={"max_tokens": 96, "untrained": True})
    real = {name.split("/")[0]: seconds for name, seconds in _LATER["seconds"].items()}
    for stage in ("tokenize", "extract_shard", "train_draft", "evaluate_draft", "export_draft"):
        assert found[stage].seconds == pytest.approx(real[stage], rel=0.25), stage
    assert sum(time.seconds or 0 for time in found.values()) == pytest.approx(sum(real.values()), rel=0.25)


def test_by_hand(tmp_path: Path) -> None:
    known = rates.given(
        rates.Rates(), ["extract=1000", "train=500", "load=60", "evaluate=10", "evaluate_draft=20"], None
    )
    found = stages(known, rows(), shards=2, world=4, gpus=4, evaluate={"max_tokens": 100, "untrained": False})
    # Two shards, each with a load of its own: 60 + 42,000 / 2 / 1000.
    assert found["extract_shard"].seconds == 60 + 21
    assert found["extract_shard"].gpu_seconds == 81 * 2 * 4
    assert "60 s + 42,000 tokens / 1,000 a second / 2 shards" in found["extract_shard"].formula
    # A minute to start, as assumed; four processes.
    assert found["train_draft"].seconds == 60 + 120_000 / (500 * 4)
    # The GPUs of its own job, which are not those of one engine.
    spread = stages(known, rows(), world=16, gpus=8)["train_draft"]
    assert spread.seconds == 60 + 120_000 / (500 * 16)
    assert spread.gpu_seconds == spread.seconds * 16
    # Two servings are loaded; 48 answers of at most 100 tokens without and with the draft.
    assert found["evaluate_draft"].seconds == 2 * 60 + 4800 / 10 + 4800 / 20
    assert found["extract_shard"].source == "given by --rate"


def test_more_draft_lengths_temperatures_and_loads_by_hand() -> None:
    """Three draft lengths are three more starts; temperatures are answered in them; few in flight are slow."""
    known = rates.given(rates.Rates(), ["load=60", "evaluate=100", "evaluate_draft=200"], None)
    evaluate = {
        "max_tokens": 100,
        "k": 3,
        "ks": [1, 3, 5],
        "temperatures": [0.0, 1.0],
        "concurrency": [1, 8],
        "untrained": False,
    }
    found = stages(known, rows(), evaluate=evaluate, tokenize={"evaluation_per_domain": 4})["evaluate_draft"]
    answers = 48 * 100 * 2
    # With one in flight 2 windows of 8 answers and 2 x 8 tokens before them, at a quarter of the speed of four; with eight 2 of 16.
    one, eight = (2 * 8 * 100 + 2 * 8) * 4, 2 * 16 * 100 + 2 * 8 * 8
    wanted = 4 * 60 + answers / 100 + 3 * answers / 200 + (one + eight) * (1 / 100 + 1 / 200)
    assert found.seconds == pytest.approx(wanted)
    assert "4 servings" in found.formula
    assert (
        "48 prompts x 100 tokens x 2 temperatures / 100 a second, and / 200 with the draft x 3 draft lengths"
        in found.formula
    )
    assert "with 1, 8 in flight" in found.formula


def test_starts_of_a_measured_evaluation_with_more_in_it(tmp_path: Path) -> None:
    """What it spent on other draft lengths, temperatures and loads is not taken for the start of an engine."""

    def measure(k: int, temperature: float) -> dict[str, Any]:
        return {
            "k": k, "temperature": temperature, "prompts": 10, "drafts": 90, "accepted": 100,
            "tokens_per_second": {"plain": 20.0, "draft": 40.0},
        }  # fmt: skip

    windows = {"plain": [{"seconds": 3.0}, {"seconds": 4.0}], "draft": [{"seconds": 2.0}, {"seconds": 1.0}]}
    run = _LATER | {
        "evaluate": measure(3, 0.0) | {
            "max_tokens": 96, "requests_at_once": 5, "untrained": None, "concurrency": [{"windows": windows}],
            "sweep": [measure(k, temperature) for k in (1, 3) for temperature in (0.0, 1.0)],
        },
    }  # fmt: skip
    # 200 tokens: twice without a draft, four times with one, and ten seconds of loads; the rest are three starts.
    seconds = 2 * 200 / 20 + 4 * 200 / 40 + 10
    run["seconds"] = _LATER["seconds"] | {"evaluate_draft": seconds + 3 * 25}
    known = rates.measured(run_folder(tmp_path, run))
    assert known.facts["serving_start"] == pytest.approx(25)
    assert known.facts["requests_at_once"] == 5


def test_a_shards_rate_of_answers(tmp_path: Path) -> None:
    """Two shards, one of which found its answers there; as many again are written by four engines, or by servers alike."""
    results = run_folder(tmp_path, _LATER)
    folder = results / "regenerate" / "shards"
    folder.mkdir(parents=True)
    for item, tokens, seconds in (("1-of-2", 6000, 30.0), ("2-of-2", 0, 0.0)):
        (folder / f"{item}.json").write_text(json.dumps({"figures": {"tokens": tokens, "seconds": seconds}}))
    wall = tmp_path / "benchmarks/rules/demo/regenerate/1-of-2.tsv"
    wall.parent.mkdir(parents=True)
    wall.write_text("s\th:m:s\tmax_rss\n50.0\t0:00:50\t1.0\n")
    known = rates.measured(results)
    assert (known.rate["regenerate"], known.fixed["regenerate"]) == (200.0, 20.0)
    asked = rows(answer_tokens=40_000)
    found = stages(known, asked, shards=4, regenerate={"enabled": True})["regenerate"]
    assert (found.jobs, found.seconds) == (4, 20 + 40_000 / (200 * 4))
    served = stages(known, asked, shards=4, regenerate={"enabled": True, "endpoint": "http://a/v1"})["regenerate"]
    assert (served.jobs, served.seconds) == (1, 20 + 40_000 / 200)


def test_what_is_not_known_is_not_made_up() -> None:
    found = stages(rates.Rates(), rows(), regenerate={"enabled": True})
    for stage in ("regenerate", "tokenize", "extract_shard", "train_draft", "evaluate_draft"):
        assert found[stage].seconds is None
        assert "--rate" in found[stage].source
    assert "dry_run" not in found
    assert stages(rates.Rates(), rows(), gpus=1)["dry_run"].seconds == 120
    # A load is assumed by the size of the weights: half a minute, and half a gigabyte at half a gigabyte a second.
    assert stages(rates.given(rates.Rates(), ["extract=1000"], None), rows())["extract_shard"].seconds == pytest.approx(
        30 + 1 + 42
    )


def test_the_sum_says_what_it_lacks() -> None:
    """A start and a check alone are no time of a run; what is known of it is the least that it takes."""
    nothing = stages(rates.Rates(), rows(), gpus=1)
    # The dry run's two minutes are known.
    assert nothing["dry_run"].seconds == 120
    shown = together(list(nothing.values()))
    assert shown[:2] == ("unknown", "")
    assert "lacking: get_target, tokenize, preflight" in shown[2]
    some = stages(rates.given(rates.Rates(), ["extract=1000", "load=18"], None), rows(), gpus=1)
    # 18 s of a load and 42 of tokens, and those two minutes.
    time, hours, which = together(list(some.values()))
    assert (time, hours) == ("at least 3 min 0 s", "at least 0.1")
    assert "extract_shard" not in which
    assert which.endswith("train_draft, export_draft, evaluate_draft")
    every = [each.model_copy(update={"seconds": 60.0, "rate": 1.0, "gpu_seconds": 360.0}) for each in some.values()]
    assert together(every)[:2] == (f"{len(every)} min 0 s", f"{len(every) / 10:,.1f}")


def test_rates_from_a_file_and_by_hand(tmp_path: Path) -> None:
    file = tmp_path / "rates.yaml"
    file.write_text("extract: 42000\ntrain: 9000\n")
    known = rates.given(rates.measured(run_folder(tmp_path, _LATER)), ["train=8000"], file)
    assert known.rate["extract_shard"] == 42_000
    assert known.rate["train_draft"] == 8000
    # What is not named stays as measured.
    assert known.rate["evaluate"] == _LATER["evaluate"]["tokens_per_second"]["plain"]
    assert known.source["extract_shard"] == f"given by {file}"


@pytest.mark.parametrize(
    ("word", "reason"),
    [("extraction=1", "no stage with a rate; known are extract"), ("extract=fast", "a positive number"), ("extract=0", "positive"), ("extract", "positive")],
)  # fmt: skip
def test_a_wrong_rate_is_one_sentence(word: str, reason: str) -> None:
    with pytest.raises(DraftsmithError, match=reason):
        rates.given(rates.Rates(), [word], None)


def test_a_run_that_went_on_has_a_rate_but_no_start_of_its_own(tmp_path: Path) -> None:
    known = rates.measured(run_folder(tmp_path, _EARLIER))
    assert _EARLIER["train"]["resumed_from"] == 300
    assert known.rate["train_draft"] == 953.7
    assert "train_draft" not in known.fixed


def test_half_written_files_give_no_rates(tmp_path: Path) -> None:
    results = run_folder(tmp_path, _LATER)
    (results / "train" / "train.json").write_text('{"tokens_per_second": 10')
    (results / "extract" / "shards" / "1-of-1.json").write_text("[]")
    (tmp_path / "benchmarks/rules/demo/export_draft.tsv").write_text("s\th:m:s\n")
    known = rates.measured(results)
    assert {"train_draft", "extract_shard", "export_draft"}.isdisjoint({*known.rate, *known.fixed})
    assert known.rate["tokenize"] > 0


def test_training_shape_needs_no_files(tmp_path: Path) -> None:
    target = given(tmp_path, SMOLLM)
    (tmp_path / "config.json").unlink()
    assert training.shape(target).hidden_size == 576
