"""The page about a run: drawn from whatever the stages left, with nothing invented and nothing unescaped."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from draftsmith import report
from draftsmith.config import Config
from draftsmith.errors import DraftsmithError
from draftsmith.report import benchmarks, dag, data, failures, stages, values
from draftsmith.report.sections import provenance
from draftsmith.report.sections.data import section as data_section

RULES = Path(__file__).parents[2] / "workflow" / "rules"
EVIL = "<script>alert('x')</script> <b> & \""
HEAD = "s\th:m:s\tmax_rss\tmax_vms\tmax_uss\tmax_pss\tio_in\tio_out\tmean_load\tcpu_time\n"

TRACE = f"Traceback (most recent call last):\n  File 'worker.py', line 3, in take\nValueError: {EVIL}\n"

REPORTS: dict[str, dict[str, Any]] = {
    "target.json": {
        "source": "package:llm_tiny", "revision": None, "architectures": ["LlamaForCausalLM"], "num_layers": 30, "hidden_size": 576,
        "vocab_size": 49152, "layers": [2, 15, 27], "torch_dtype": "bfloat16", "trust_remote_code": False, "fingerprint": "f00d" * 16,
    },
    "tokenize/tokenize.json": {
        "conversations": 40, "rows": 33, "tokens": 4000, "supervised": 1000, "truncated": 1, "tokens_by_split": {"train": 3600, "validation": 400},
        "by_split": {"train": 30, "validation": 3, "evaluation": 4}, "by_domain": {EVIL: {"train": 30, "validation": 3, "evaluation": 4}},
        "dropped": {"too_short": 3}, "dropped_examples": {"too_short": "chats.jsonl, line 7"}, "length_histogram": [[32, 2], [128, 31]],
        "mask_method": "prefix", "row_per": "conversation", "template_sha256": "ab" * 32,
    },
    "preflight.json": {"verdict": "ok", "checks": [{"name": "layers", "status": "ok", "detail": "[2, 15, 27] of 30"}]},
    "dry_run.json": {"verdict": "skipped", "checks": [{"name": "dry run", "status": "skip", "detail": "no GPU is used here"}]},
    "clean_gpus.json": {"gpus": [{"index": "0", "name": "NVIDIA H200", "total": 150_000_000_000, "used": 0}], "ended": []},
    "extract/manifest.json": {
        "store": "store/0d22", "fingerprint": "0d22", "layers": [2, 15, 27], "dtype": "float32", "hidden_size": 576,
        "rows": {"a" * 32: ["00.safetensors", 0], "b" * 32: ["01.safetensors", 0]}, "tokens": 3900, "bytes": 39_000_000,
        "failed": [{"row_id": "c" * 32, "error": f"ValueError: {EVIL}\nsecond line", "traceback": TRACE}],
    },
    "extract/shards/1-of-1.json": {
        "rows": {"a" * 32: ["00.safetensors", 0]}, "failed": [],
        "figures": {"tokens": 3900, "bytes": 39_000_000, "seconds": 13.0, "tokens_per_second": 300.0, "load_seconds": 20.5, "method": "native",
                    "reused_rows": 0, "writer": {"blocked_seconds": 0.0}},
    },
    "vocabulary/vocabulary.json": {
        "size": 4096, "target_size": 49152, "coverage": 0.93, "distinct": 900, "padded": 0, "kept_special": [1, 2],
        "coverage_by_size": [[1000, 0.7], [4096, 0.93], [49152, 1.0]],
    },
    "look/look.json": {
        "seed": 0, "rows": {"train": 30, "validation": 3}, "by_domain": {EVIL: {"train": {"rows": 30, "tokens": 3600, "supervised": 900}}},
        "answer_lengths": {"train": [[32, 20], [64, 10]]}, "supervised_shares": {"train": [[3, 30]], "validation": [[3, 3]]}, "prompts": {EVIL: 4},
        "languages": {"by": "py3langid", "counts": {"train": {"en": 20}, "evaluation": {"en": 4}}}, "tokenizer": "",
        "sample": [{
            "row_id": "d" * 32, "conversation_id": EVIL, "source": EVIL, "domain": EVIL, "split": "train", "why": ["longest", EVIL], "length": 1003,
            "supervised": 2, "spans": 1, "first_spans": [[1001, 1003]],
            "parts": [
                {"start": 0, "supervised": False, "tokens": [[5, EVIL, False]]}, {"start": 1, "left_out": 1000, "supervised": 0},
                {"start": 1001, "supervised": True, "tokens": [[6, " <b>\n", False], [2, "<|end|>", True]]},
            ],
        }],
    },
    "train/train.json": {
        "fingerprint": "ca11", "steps": 20, "epochs": 2.0, "params": 9876, "resumed_from": 10, "seconds": 60.0, "tokens": 7200,
        "tokens_per_second": 120.0, "world_size": 1, "best": {"step": 20, "eval_loss": 3.2}, "simulated_acceptance_length": 1.83,
        "accuracy": [0.4, 0.3], "acceptance": [0.4, 0.5],
        "history": [
            {"step": 10, "loss": 5.0, "accuracy": [0.2, 0.1], "tokens_per_second": 118.0},
            {"step": 20, "loss": 3.0, "accuracy": [0.4, 0.3], "tokens_per_second": 122.0, "eval_loss": 3.2, "eval_accuracy": [0.4, 0.3],
             "eval_acceptance_length": 1.83},
        ],
    },
    "draft/export.json": {
        "folder": "results/demo/draft",
        "bytes": 19_000_000,
        "fingerprint": "ca11",
        "verifier": "llm_tiny",
        "checks": [{"name": "tensor names", "status": "ok", "detail": "14 tensors"}],
    },
    "evaluate/evaluate.json": {
        "k": 3, "prompts": 4, "max_tokens": 96, "temperature": 0.0, "acceptance_length": 1.75, "drafts": 100, "accepted": 75,
        "per_position": [0.5, 0.2, 0.05], "per_domain": {EVIL: {"prompts": 4, "acceptance_length": 1.75, "drafts": 100, "accepted": 75,
                                                                 "per_position": [0.5, 0.2, 0.05]}},
        "tokens_per_second": {"plain": 40.0, "draft": 50.0}, "speedup": 1.25, "requests_at_once": 4, "outputs_equal": True, "differing": [],
        "untrained": {"prompts": 16, "acceptance_length": 1.02, "per_position": [0.02, 0.0, 0.0]}, "gate": {"minimum": 1.4, "passed": True, "causes": []},
        "versions": {"draftsmith": "0.1.0", "vllm": "0.32.0", "torch": "2.13.0", "transformers": "5.19.0"},
    },
}  # fmt: skip


class Page(HTMLParser):
    """What a test wants to know of a page: its tags with attributes, its text without scripts, its charts."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.charts: dict[str, Any] = {}
        self.scripts: list[str] = []
        self._inside: dict[str, str | None] | None = None
        self._parts: list[str] = []
        self.source = path.read_text()
        self.feed(self.source)
        self.text = " ".join(" ".join(self._parts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._inside = dict(attrs)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._inside = None

    def handle_data(self, content: str) -> None:
        if self._inside is None:
            self._parts.append(content)
        elif name := self._inside.get("data-chart"):
            self.charts[name.removeprefix("chart-")] = json.loads(content)
        else:
            self.scripts.append(content)

    def ids(self) -> list[str]:
        return [attributes["id"] or "" for _, attributes in self.tags if "id" in attributes]


Draw = Callable[..., Page]


@pytest.fixture
def draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Draw:
    """Draws the page of the given stage files; plotly.js itself is left out, one test apart."""
    monkeypatch.setattr(report, "get_plotlyjs", lambda: "/* plotly.js */")

    def call(
        reports: dict[str, Any],
        measured: dict[str, str] | None = None,
        rulegraph: str | None = None,
        config: Config | None = None,
    ) -> Page:
        for name, content in reports.items():
            put(tmp_path / "results" / name, content if isinstance(content, str) else json.dumps(content))
        for name, content in (measured or {}).items():
            put(tmp_path / "benchmarks" / name, content)
        graph = None if rulegraph is None else put(tmp_path / "graph.mmd", rulegraph)
        page = tmp_path / "report.html"
        report.run(
            config or Config(),
            results=tmp_path / "results",
            benchmarks=tmp_path / "benchmarks",
            rulegraph=graph,
            page=page,
        )
        return Page(page)

    return call


def put(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


# ---- the page ----


def test_the_headline_names_every_figure_and_what_it_is(draw: Draw) -> None:
    text = draw(REPORTS, {"train_draft.tsv": HEAD + "61.5\t0:01:01\t512\t1\t1\t1\t10\t20\t90\t55\n"}).text
    assert "Acceptance length 1.75 gate 1.4: passed 1 + accepted / drafts, k = 3, 4 held-out prompts" in text
    assert "Untrained draft 1.02 acceptance length before training, on 16 of the prompts" in text
    assert "Speed-up 1.25 × 40.0 to 50.0 generated tokens/s, up to 4 at once" in text  # noqa: RUF001
    assert "Training rows 30 3,600 tokens, 2 epochs, 7,200 trained on in all" in text
    assert "Store 39.0 MB hidden states in 2 files, 10,000 bytes a token" in text
    assert "Total time 1 min 2 s sum over the last run of 1 measured job" in text


def test_sections_show_what_the_stages_found(draw: Draw) -> None:
    text = draw(REPORTS).text
    for expected in (
        "Supervised share 25.0% 1,000 of 4,000 tokens", "too_short fewer tokens than tokenize.min_supervised_tokens are supervised chats.jsonl, line 7 3 7.5%", "Speed 300 tokens/s of one engine", "Coverage 93.0%",
        "Resumed from step 10", "Validation loss of that draft 3.2 at step 20", "Answers equal yes", "NVIDIA H200 (150 GB)", "vllm 0.32.0",
        "Target fingerprint " + "f00d" * 16, "Store fingerprint 0d22", "Weights 19.0 MB", "tensor names ok 14 tensors", "layers ok [2, 15, 27] of 30",
        "Preflight: ok Check Status Found", "Dry run: skipped Check Status Found dry run skip no GPU is used here",
    ):  # fmt: skip
        assert expected in text, expected


def test_rows_are_shown_token_by_token_with_what_cannot_be_seen(draw: Draw) -> None:
    page = draw(REPORTS)
    assert "1,000 tokens left out, none of them supervised" in page.text
    assert "2 tokens, 1001 to 1002: “·<b>↵” (6) to “<|end|>” (2)" in page.text
    assert "Simulated 1.83 acceptance length on validation rows with 2 tokens drafted" in page.text
    body = page.source.split('class="tokens"')[1].split("</div>")[0]
    assert body.count("<mark") == 1
    inside = body.split("<mark")[1].split("</mark>")[0]
    assert re.findall(r'title="place (\d+), id (\d+)"', inside) == [("1001", "6"), ("1002", "2")]
    assert '<i class="space"> </i>&lt;b&gt;<i class="line">\n</i>' in inside
    assert 'class="special" title="place 1002' in inside


def test_a_page_loads_nothing_and_every_link_leads_somewhere(draw: Draw) -> None:
    page = draw(REPORTS)
    ids = page.ids()
    assert len(ids) == len(set(ids))
    for tag, attributes in page.tags:
        assert "src" not in attributes, tag
        target = attributes.get("href")
        if target is not None:
            assert target == "data:," or target.removeprefix("#") in ids, target
    own = "".join(script for script in page.scripts if "plotly.js" not in script)
    assert not re.search(r"https?:|url\(|@import|fetch\(", own)
    assert set(page.charts) == {
        "domains", "lengths", "shares", "answers", "mix-domains", "mix-languages", "coverage", "loss", "simulated", "accuracy", "speed", "acceptance", "positions", "throughput",
    }  # fmt: skip
    assert {f"chart-{name}" for name in page.charts} <= set(ids)


def test_plotly_is_inline_once(tmp_path: Path) -> None:
    put(tmp_path / "results" / "target.json", json.dumps(REPORTS["target.json"]))
    report.run(Config(), results=tmp_path / "results", benchmarks=tmp_path, rulegraph=None, page=tmp_path / "page.html")
    scripts = [script for script in Page(tmp_path / "page.html").scripts if len(script) > 1_000_000]
    assert len(scripts) == 1
    assert (tmp_path / "page.html").stat().st_size < 8_000_000


def test_text_from_data_stays_text(draw: Draw) -> None:
    reports = REPORTS | {
        "target.json": REPORTS["target.json"] | {"source": EVIL},
        "evaluate/evaluate.json": REPORTS["evaluate/evaluate.json"]
        | {"gate": {"minimum": 2, "passed": False, "causes": [EVIL]}},
    }
    page = draw(reports, config=Config.model_validate({"report": {"title": EVIL}}))
    assert "<script>alert" not in page.source
    assert sum(tag == "script" for tag, _ in page.tags) == len(page.charts) + 3
    # Plotly takes tags in labels for markup, so they are escaped for it as well.
    assert page.charts["acceptance"]["data"][0]["y"][1].startswith("&lt;script&gt;")


def test_every_colour_of_a_chart_is_one_of_the_themes(draw: Draw) -> None:
    page = draw(REPORTS)
    css = next(script for script in page.scripts if ":root" in script)
    used = set(re.findall(r"var\((--[\w-]+)\)", json.dumps(page.charts)))
    assert used
    for name in used:
        assert re.search(rf"{name}: light-dark\(", css), name
    assert not re.search(r'"#[0-9a-fA-F]{3,8}"', json.dumps(page.charts))


def test_a_failed_row_keeps_its_whole_traceback_and_is_summed_up_by_its_first_line(draw: Draw) -> None:
    page = draw(REPORTS)
    assert f"1 row: ValueError: {EVIL} row: {'c' * 32} Traceback" in page.text
    assert "line 3, in take" in page.text
    assert "Of 3 rows, 1 could not be extracted" in page.text


# ---- what is missing ----


@pytest.mark.parametrize("name", REPORTS)
def test_without_any_key_of_a_file_the_page_is_drawn(draw: Draw, name: str) -> None:
    page = draw(REPORTS | {name: {}})
    assert "–" in page.text  # noqa: RUF001


@pytest.mark.parametrize("name", [name for name in REPORTS if "shards" not in name])
def test_with_a_stage_alone_the_page_is_drawn_and_says_what_is_missing(draw: Draw, name: str) -> None:
    assert "no such file; the stage that makes it has not run" in draw({name: REPORTS[name]}).text


@pytest.mark.parametrize("value", [None, "x", [], {}, [None], {"a": None}, True])
def test_values_of_another_type_are_missing_and_no_error(draw: Draw, value: Any) -> None:
    draw({name: dict.fromkeys(content, value) for name, content in REPORTS.items()})


def test_without_validation_and_untrained_draft_the_reasons_are_told(draw: Draw) -> None:
    train = REPORTS["train/train.json"] | {
        "best": None,
        "simulated_acceptance_length": None,
        "accuracy": None,
        "acceptance": None,
    }
    train["history"] = [
        {key: value for key, value in entry.items() if not key.startswith("eval_")} for entry in train["history"]
    ]
    page = draw(
        REPORTS
        | {"train/train.json": train, "evaluate/evaluate.json": REPORTS["evaluate/evaluate.json"] | {"untrained": None}}
    )
    assert "Untrained draft – not measured: evaluate.untrained is off" in page.text  # noqa: RUF001
    assert "no validation was recorded: there are no validation rows" in page.text
    assert "Training rows (there is no validation)" in page.text
    assert "simulated" not in page.charts
    assert [trace["name"] for trace in page.charts["loss"]["data"]] == ["training"]
    assert [trace["name"] for trace in page.charts["positions"]["data"]] == ["trained"]


def test_without_any_results_it_fails_with_the_mend(draw: Draw) -> None:
    with pytest.raises(DraftsmithError, match="holds no results of any stage; run the workflow first"):
        draw({})


def test_boxes_of_stages_without_results_are_dashed(draw: Draw) -> None:
    page = draw({name: REPORTS[name] for name in ("target.json", "tokenize/tokenize.json")})
    undone = [attributes for tag, attributes in page.tags if tag == "rect" and attributes["class"] == "box undone"]
    assert len(undone) == len(stages.graph(regenerated=False)) - 3
    assert "extract_shard no results" in page.text


def test_a_broken_file_is_told_of_in_its_place(draw: Draw) -> None:
    page = draw(REPORTS | {"train/train.json": "{", "vocabulary/vocabulary.json": "[]"})
    assert "train.json: not valid JSON" in page.text
    assert "vocabulary.json: holds no JSON object" in page.text


def test_checks_that_failed_are_drawn_with_their_tracebacks(draw: Draw) -> None:
    check = {"name": "extraction", "status": "fail", "detail": "ended after 5 s", "traceback": TRACE}
    reports = {name: content for name, content in REPORTS.items() if name != "dry_run.json"}
    text = draw(reports | {"failed-dry_run.json": {"verdict": "fail", "checks": [check]}}).text
    assert "The dry run had something to say: extraction: ended after 5 s" in text
    assert "Dry run: fail Check Status Found extraction fail ended after 5 s" in text
    assert f"Dry run, extraction: what was raised {' '.join(TRACE.split())}" in text
    warned = {"verdict": "ok", "checks": [{"name": "precision", "status": "warn", "detail": "slow"}]}
    assert "The preflight had something to say: precision: slow" in draw(REPORTS | {"preflight.json": warned}).text


def test_a_failed_gate_is_drawn_with_its_causes(draw: Draw) -> None:
    failed = REPORTS["evaluate/evaluate.json"] | {
        "acceptance_length": 1.01, "gate": {"minimum": 1.4, "passed": False, "causes": ["layer ids: the export asks for [1]"]},
        "outputs_equal": False, "differing": ["p-1"], "one_job": False,
    }  # fmt: skip
    text = draw(REPORTS | {"evaluate/evaluate.json": failed}).text
    assert "gate 1.4: failed" in text
    assert "The acceptance length 1.01 is below evaluate.min_acceptance_length (1.4). Likely causes: layer ids" in text
    assert "is not the draft's: the machine was busier while the target was served alone." in text
    assert "The target was served alone in an earlier job" in text
    assert "1 of 4 answers differs from plain greedy decoding" in text
    assert "1 prompt with another answer Ids of tokenize/prompts.jsonl. p-1" in text


def test_only_settings_that_were_given_are_shown(draw: Draw) -> None:
    text = draw(REPORTS, config=Config.model_validate({"name": "demo", "evaluate": {"k": 5}})).text
    assert "name: demo evaluate: k: 5" in text
    assert "learning_rate" not in text


# ---- benchmarks and shards ----


def test_benchmarks_are_read_as_snakemake_writes_them(tmp_path: Path) -> None:
    put(tmp_path / "tokenize.tsv", HEAD + "2.5\t0:00:02\t100.5\t1\t1\t1\t0.5\t-\t90\t4.25\n")
    put(tmp_path / "map_vocabulary.tsv", HEAD + "0.01\t0:00:00" + "\tNA" * 8 + "\n")
    put(tmp_path / "extract_shard" / "1-of-2.tsv", HEAD + "10\t0:00:10\t10\t1\t1\t1\t1\t1\t90\t20\n")
    put(tmp_path / "extract_shard" / "2-of-2.tsv", HEAD + "30\t0:00:30\t10\t1\t1\t1\t1\t1\t90\t20\n")
    put(tmp_path / "extract_shard" / "1-of-1.tsv", HEAD + "999\t0:16:39\t10\t1\t1\t1\t1\t1\t90\t20\n")
    put(tmp_path / "empty.tsv", "")
    found = benchmarks.read(tmp_path, {"extract_shard": 2})
    tokenize, vocabulary = found.of("tokenize")[0], found.of("map_vocabulary")[0]
    assert (tokenize.seconds, tokenize.cpu_seconds, tokenize.peak_bytes) == (2.5, 4.25, 100.5 * 2**20)
    assert (tokenize.read_bytes, tokenize.written_bytes) == (2**19, None)
    assert (vocabulary.seconds, vocabulary.peak_bytes) == (0.01, None)
    assert [job.name for job in found.of("extract_shard")] == ["1-of-2", "2-of-2"]
    assert found.seconds("extract_shard") == 40
    assert found.seconds("export_draft") is None
    assert found.count() == 4


def test_stage_times_and_sizes_are_in_the_table_and_the_graph(draw: Draw) -> None:
    line = "600\t0:10:00\t1000\t1\t1\t1\t100\t200\t90\t1100\n"
    page = draw(REPORTS, {"extract_shard/1-of-1.tsv": HEAD + line})
    assert "extract_shard 1 10 min 0 s 18 min 20 s 1.0 GB 105 MB 210 MB 39.0 MB" in page.text
    assert "extract_shard: hidden states into the store extract_shard 10 min 0 s" in page.text
    assert "– = the rule has no benchmark file" in page.text  # noqa: RUF001


def test_answers_of_two_shards(draw: Draw) -> None:
    """Their times are theirs, and those of an earlier number of shards do not count; what joined them tells of the answers."""
    regenerated = {
        "conversations": 40, "kept": 38, "answers": 50, "answer_tokens": 1200, "reused": 8, "shards": 2, "generated_tokens": 1000,
        "seconds": 20.0, "tokens_per_second": 50.0, "dropped": {"truncated": 2}, "finish_reasons": {"stop": 50}, "failed": [],
    }  # fmt: skip
    reports = REPORTS | {"regenerate/regenerate.json": regenerated}
    reports |= {f"regenerate/shards/{item}.json": {"conversations": 20} for item in ("1-of-2", "2-of-2", "1-of-1")}
    seconds = {"1-of-1": 999, "1-of-2": 30, "2-of-2": 32}
    lines = {
        f"regenerate/{item}.tsv": f"{HEAD}{took}\t0:00:00\t1\t1\t1\t1\t1\t1\t90\t1\n" for item, took in seconds.items()
    }
    text = draw(reports, lines).text
    assert "regenerate 2 1 min 2 s 2.0 s" in text
    assert "regenerate: answers in the target's own words regenerate 1 min 2 s · 2 jobs" in text
    assert "merge_answers: conversations with these answers merge_answers time not measured" in text
    assert "Conversations kept 38" in text
    assert "Shards 2 Speed of a shard 50.0 tokens/s" in text


def test_the_complete_set_of_shards_written_last_counts(tmp_path: Path) -> None:
    folder = tmp_path / "extract" / "shards"
    for place, name in enumerate(["1-of-1", "1-of-2", "2-of-2", "1-of-3"]):
        path = put(folder / f"{name}.json", json.dumps({"rows": {"a": ["f", 0]}, "figures": {"tokens": place}}))
        os.utime(path, (place, place))
    put(tmp_path / "target.json", "{}")
    gathered = data.gather(Config(), tmp_path, tmp_path / "none")
    assert list(gathered.shards) == ["1-of-2", "2-of-2"]
    assert gathered.shards["2-of-2"] == {"figures": {"tokens": 2}, "rows": 1}


# ---- the graph ----


def smk_graph() -> dict[str, set[str]]:
    """The graph by the files that the rules name as input and output."""
    inputs: dict[str, set[str]] = {}
    makers: dict[str, str] = {}
    for path in RULES.glob("*.smk"):
        parts = re.split(r"^    (\w+):$", path.read_text(), flags=re.MULTILINE)
        blocks = dict(zip(parts[1::2], parts[2::2], strict=True))
        if path.stem != "common":
            inputs[path.stem] = set(re.findall(r'RESULTS / "([^"]+)"', blocks.get("input", "")))
            makers |= dict.fromkeys(re.findall(r'RESULTS / "([^"]+)"', blocks["output"]), path.stem)
    return {rule: {makers[name] for name in names} for rule, names in inputs.items()}


def test_the_graph_of_the_package_is_that_of_the_rules() -> None:
    """But for the gate, which comes when the page is drawn."""
    graph = smk_graph()
    assert graph.pop("gate") == set(stages.BY_NAME["gate"].needs)
    assert stages.graph(regenerated=True) == graph


MERMAID = """---
title: DAG
---
flowchart TB
\tid0[all]
\tid1[c]
\tid2["b"]
\tid3[a]
\tid4[side]
\tstyle id0 fill:#D95757,stroke-width:2px,color:#333333
\tid1 --> id0
\tid2 --> id1
\tid3 --> id1
\tid3 --> id2
\tid3 --> id4
\tid4 --> id1
"""


def test_a_mermaid_graph_is_read_without_all(tmp_path: Path) -> None:
    graph = dag.read_mermaid(put(tmp_path / "graph.mmd", MERMAID))
    assert graph == {"c": {"a", "b", "side"}, "b": {"a"}, "a": set(), "side": {"a"}}
    assert dag.reduced(graph) == {"c": {"b", "side"}, "b": {"a"}, "a": set(), "side": {"a"}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no rule is found in it"),
        ("id0[a]\nid1[b]\nid0 --> id1\nid1 --> id0\n", "the rules a, b wait for one another"),
    ],
)
def test_what_is_no_graph_is_refused(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(DraftsmithError, match=message):
        dag.read_mermaid(put(tmp_path / "graph.mmd", content))


def test_a_graph_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DraftsmithError, match=r"none\.mmd: cannot be read"):
        dag.read_mermaid(tmp_path / "none.mmd")


def test_a_given_graph_is_drawn_with_rules_that_are_not_known(draw: Draw) -> None:
    page = draw(REPORTS, rulegraph=MERMAID.replace("[a]", "[get_target]"))
    assert "side" in page.text
    assert "tokenize 1" not in page.text


@pytest.mark.parametrize("regenerated", [True, False])
def test_boxes_and_passing_edges_keep_apart(regenerated: bool) -> None:
    graph = stages.graph(regenerated=regenerated)
    drawing = dag.draw(graph, lambda name: dag.Box("", None, "", True))
    boxes = {placed.name: placed for placed in drawing.boxes}
    assert set(boxes) == set(graph)
    for rule, needs in graph.items():
        assert all(boxes[need].y < boxes[rule].y for need in needs)
    places = [(placed.x, placed.y) for placed in drawing.boxes]
    assert len(set(places)) == len(places)
    for path in drawing.paths:
        # A straight line past a row starts where the curve before it ends.
        for x, top, bottom in re.findall(r"([\d.]+) ([\d.]+)V([\d.]+)", path):
            for placed in drawing.boxes:
                beside = float(x) < placed.x or float(x) > placed.x + drawing.box_width
                assert beside or float(bottom) <= placed.y or float(top) >= placed.y + drawing.box_height
    assert all(placed.x + drawing.box_width <= drawing.width for placed in drawing.boxes)


# ---- small parts ----


@pytest.mark.parametrize(
    ("form", "value", "expected"),
    [
        (values.size, 0, "0 bytes"), (values.size, 999, "999 bytes"), (values.size, 1500, "1.5 kB"), (values.size, 3.8e9, "3.8 GB"),
        (values.size, 2.5e15, "2,500.0 TB"), (values.duration, 0.25, "250 ms"), (values.duration, 59.94, "59.9 s"),
        (values.duration, 59.96, "1 min 0 s"), (values.duration, 3600, "1 h 0 min"), (values.duration, 200_000, "2 d 7 h"),
        (values.share, 0.1234, "12.3%"), (values.rate, 8.25, "8.2 tokens/s"), (values.rate, 66_500, "66,500 tokens/s"),
    ],
)  # fmt: skip
def test_forms(form: Callable[[float], str], value: float, expected: str) -> None:
    assert form(value) == expected


@pytest.mark.parametrize("value", [True, "1", None, float("nan"), float("inf"), [1]])
def test_what_is_no_number_is_missing(value: Any) -> None:
    assert values.number({"a": value}, "a") is None


def test_lengths_between_two_bins_are_shown_as_empty(tmp_path: Path) -> None:
    put(tmp_path / "tokenize" / "tokenize.json", json.dumps({"length_histogram": [[1, 1], [2, 3], [16, 4]]}))
    chart = next(
        chart for chart in data_section(data.gather(Config(), tmp_path, tmp_path)).charts if chart.id == "lengths"
    )
    assert chart.figure is not None
    assert chart.figure["data"][0]["x"] == ["1", "2", "3–4", "5–8", "9–16"]  # noqa: RUF001
    assert chart.figure["data"][0]["y"] == [1, 3, 0, 0, 4]


def test_errors_alike_are_told_once_and_an_empty_text_shows_the_type() -> None:
    entries = [{"row_id": f"r{place}", "error": "AssertionError: ", "traceback": "T"} for place in range(25)]
    details = failures.failure_details([*entries, {"row_id": "z", "error": "", "traceback": ""}], "row_id", "row")
    assert [detail.summary for detail in details] == ["25 rows: AssertionError", "1 row: an error without a text"]
    assert details[0].note.endswith("r19 and 5 more")
    assert details[1].body == "no traceback was recorded"


def test_a_package_outside_of_a_checkout_has_no_commit(tmp_path: Path) -> None:
    found = provenance.commit(put(tmp_path / "package" / "__init__.py", ""))
    assert (found.text, found.why) == (values.DASH, "the package does not run from a git checkout")


def test_uncommitted_changes_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answers = {"ls-files": "__init__.py", "rev-parse": "abc123", "status": " M x"}
    monkeypatch.setattr(provenance, "_git", lambda folder, command, *_: answers[command])
    assert provenance.commit(tmp_path / "__init__.py").text == "abc123, with uncommitted changes"
