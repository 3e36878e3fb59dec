"""Draft lengths, temperatures and numbers of requests: what is served for them, what is kept, and what comes out."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from draftsmith import evaluate_draft
from draftsmith.config import Config
from draftsmith.errors import DraftsmithError
from draftsmith.evaluate_draft import servings

QUESTIONS = [
    {"prompt_id": "p1", "domain": "b", "prompt_token_ids": [1, 2, 3]},
    {"prompt_id": "p2", "domain": "a", "prompt_token_ids": [1, 2]},
    {"prompt_id": "p3", "domain": "b", "prompt_token_ids": [1]},
]


class Engine:
    """Stands for the process that serves: of 10 drafts in each domain it accepts k at temperature 0 and none above."""

    def __init__(self) -> None:
        self.starts: list[tuple[str, list[str]]] = []
        self.dies_after: int | None = None
        self.other_answer: int | None = None

    def run(self, command: list[str]) -> Any:
        path = Path(command[-1])
        job = json.loads(path.read_text())
        self.starts.append((job["name"], [measure["name"] for measure in job["measures"]]))
        k = job["arguments"].get("speculative_config", {}).get("num_speculative_tokens", 0)
        for number, measure in enumerate(job["measures"]):
            if number == self.dies_after:
                return subprocess.CompletedProcess(command, 1)
            result = measure | self.measured(job, measure, k) | {"vllm": "0.32.0"}
            (path.parent / f"{measure['name']}.json").write_text(json.dumps(result))
        return subprocess.CompletedProcess(command, 0)

    def measured(self, job: dict[str, Any], measure: dict[str, Any], k: int) -> dict[str, Any]:
        if measure["in_flight"]:
            rate = 10.0 * measure["in_flight"]
            return {"windows": [{"tokens": 1}], "tokens_per_second": rate * 1.5 if k else rate}
        accepted = k if measure["temperature"] == 0 else 0
        counts = {
            "drafts": 10 if k else 0, "draft_tokens": 10 * k, "accepted": accepted, "per_position": [1 if accepted else 0] * k,
        }  # fmt: skip
        names = [prompt["domain"] for prompt in job["prompts"]]
        outputs = [[5, 6] for _ in names]
        if k == self.other_answer:
            outputs[1] = [5, 7]
        domains = {name: {"prompts": names.count(name), **counts} for name in names}
        return {"outputs": outputs, "domains": domains, "tokens_per_second": 20.0 + k}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine()
    monkeypatch.setattr(servings.subprocess, "run", made.run)
    return made


def evaluate(folder: Path, **settings: Any) -> dict[str, Any]:
    draft = folder / "draft"
    draft.mkdir(exist_ok=True)
    (draft / "config.json").write_text("{}")
    (draft / "model.safetensors").write_bytes(b"weights")
    (folder / "target.json").write_text(json.dumps({"path": "model", "fingerprint": "f", "torch_dtype": "float32"}))
    (folder / "prompts.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    evaluate_draft.run(
        Config.model_validate({"engine": {"device": "cpu"}, "evaluate": settings}), target=folder / "target.json", draft=draft,
        vocabulary=folder / "none", prompts=folder / "prompts.jsonl", workdir=folder / "work", report=folder / "run/evaluate/evaluate.json",
    )  # fmt: skip
    return dict(json.loads((folder / "run/evaluate/evaluate.json").read_text()))


def test_by_default_two_engines_take_one_measure_each(engine: Engine, tmp_path: Path) -> None:
    told = evaluate(tmp_path)
    assert engine.starts == [("plain", ["answers-at-0"]), ("draft-3", ["answers-at-0"])]
    assert (told["sweep"], told["concurrency"]) == ([], [])
    # Two domains: 6 accepted of 20 drafts.
    assert told["acceptance_length"] == pytest.approx(1 + 6 / 20)


def test_a_start_for_each_draft_length_and_none_for_a_temperature(engine: Engine, tmp_path: Path) -> None:
    told = evaluate(tmp_path, k=2, ks=[1, 2, 3, 1], temperatures=[0, 1.0], concurrency=[1, 8])
    both = ["answers-at-0", "answers-at-1"]
    loads = ["1-in-flight-at-0", "8-in-flight-at-0"]
    assert engine.starts == [("plain", both + loads), ("draft-2", both + loads), ("draft-1", both), ("draft-3", both)]
    table = {(each["k"], each["temperature"]): each for each in told["sweep"]}
    assert list(table) == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]
    # 1 + accepted / drafts, by domain and over both.
    for k in (1, 2, 3):
        assert table[k, 0]["acceptance_length"] == pytest.approx(1 + 2 * k / 20)
        assert table[k, 0]["per_domain"]["a"]["acceptance_length"] == pytest.approx(1 + k / 10)
        assert table[k, 0]["per_position"] == [0.1] * k
        assert table[k, 1]["acceptance_length"] == 1.0
        assert table[k, 0]["speedup"] == pytest.approx((20 + k) / 20)
        assert (table[k, 0]["outputs_equal"], table[k, 1]["outputs_equal"]) == (True, None)
    assert (told["k"], told["acceptance_length"]) == (2, table[2, 0]["acceptance_length"])
    assert [(each["requests"], each["tokens_per_second"], each["speedup"]) for each in told["concurrency"]] == [
        (1, {"plain": 10.0, "draft": 15.0}, 1.5), (8, {"plain": 80.0, "draft": 120.0}, 1.5),
    ]  # fmt: skip


def test_what_is_there_is_not_measured_again(engine: Engine, tmp_path: Path) -> None:
    evaluate(tmp_path, k=2)
    engine.starts.clear()
    evaluate(tmp_path, k=2, ks=[4], temperatures=[1.0])
    assert engine.starts == [
        ("plain", ["answers-at-1"]), ("draft-2", ["answers-at-1"]), ("draft-4", ["answers-at-0", "answers-at-1"]),
    ]  # fmt: skip


def test_a_serving_that_was_killed_goes_on_behind_its_last_measure(engine: Engine, tmp_path: Path) -> None:
    engine.dies_after = 1
    with pytest.raises(RuntimeError, match="serving 'plain' ended with exit code 1"):
        evaluate(tmp_path, temperatures=[1.0])
    engine.dies_after = None
    engine.starts.clear()
    evaluate(tmp_path, temperatures=[1.0])
    assert engine.starts == [("plain", ["answers-at-1"]), ("draft-3", ["answers-at-0", "answers-at-1"])]


def test_temperatures_that_differ_in_the_last_digits_are_measures_of_their_own(engine: Engine, tmp_path: Path) -> None:
    told = evaluate(tmp_path, temperatures=[0.7000001, 0.7000002])
    assert engine.starts[0] == ("plain", ["answers-at-0", "answers-at-0.7000001", "answers-at-0.7000002"])
    assert [each["temperature"] for each in told["sweep"]] == [0, 0.7000001, 0.7000002]


def test_what_another_version_measured_in_its_way_is_measured_anew(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr(servings, "_FORMAT", 3)
        evaluate(tmp_path)
    engine.starts.clear()
    evaluate(tmp_path)
    assert [name for name, _ in engine.starts] == ["plain", "draft-3"]


def test_longer_answers_are_measured_anew(engine: Engine, tmp_path: Path) -> None:
    evaluate(tmp_path)
    engine.starts.clear()
    evaluate(tmp_path, max_tokens=5)
    assert [name for name, _ in engine.starts] == ["plain", "draft-3"]


def test_another_greedy_answer_is_named_by_draft_length(
    engine: Engine, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    engine.other_answer = 1
    told = evaluate(tmp_path, k=2, ks=[1], temperatures=[1.0])
    # Domain a comes first, so that the second question is p1.
    assert [(e["k"], e["temperature"], e["outputs_equal"], e["differing"]) for e in told["sweep"]] == [
        (1, 0, False, ["p1"]), (1, 1, None, []), (2, 0, True, []), (2, 1, None, []),
    ]  # fmt: skip
    assert (told["outputs_equal"], told["differing"]) == (True, [])
    assert "k = 1: 1 of 3 answers differ from plain greedy decoding: p1" in capfd.readouterr().err


def test_below_the_gate_no_further_draft_length_is_served(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        evaluate_draft, "likely_causes", lambda served, counts, minimum: [f"{counts.accepted} of {minimum:g}"]
    )
    failed = evaluate(tmp_path, ks=[1, 2], min_acceptance_length=2.0)
    assert [name for name, _ in engine.starts] == ["plain", "draft-3"]
    assert failed["gate"] == {"minimum": 2.0, "passed": False, "causes": ["6 of 2"]}
    assert evaluate(tmp_path, ks=[1, 2], min_acceptance_length=1.3)["gate"]["passed"]
    assert [name for name, _ in engine.starts] == ["plain", "draft-3", "draft-1", "draft-2"]


def test_a_speed_up_that_the_draft_cannot_have_is_doubted(
    engine: Engine, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """23 tokens/s against 20 with 1.3 tokens a step may be; 60 against 20, and of two jobs, is said to be something else."""
    assert evaluate(tmp_path)["one_job"] is True
    assert "speed-up" not in capfd.readouterr().err
    (kept,) = (tmp_path / "work").glob("*/draft-3/answers-at-0.json")
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"tokens_per_second": 60.0, "job": "another"}))
    assert evaluate(tmp_path)["one_job"] is False
    said = capfd.readouterr().err
    assert "a speed-up of 3.00 with an acceptance length of 1.30 is not the draft's" in said
    assert "the target was served alone in an earlier job" in said


def test_a_work_folder_that_is_a_file_is_named(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "work").touch()
    with pytest.raises(DraftsmithError, match=r"/work: cannot be written \(File exists\).* run evaluate_draft again"):
        evaluate(tmp_path)
    assert engine.starts == []


def test_a_draft_that_is_gone_is_named(tmp_path: Path) -> None:
    (tmp_path / "target.json").write_text(json.dumps({"path": "model", "fingerprint": "f", "torch_dtype": "float32"}))
    (tmp_path / "prompts.jsonl").write_text(json.dumps(QUESTIONS[0]))
    paths = {name: tmp_path / name for name in ("draft", "vocabulary", "workdir", "report")}
    with pytest.raises(
        DraftsmithError, match=r"draft/config\.json: cannot be read \(No such .* run export_draft again"
    ):
        evaluate_draft.run(Config(), target=tmp_path / "target.json", prompts=tmp_path / "prompts.jsonl", **paths)
