"""The benchmark of Kimi-K2.5's shape, as far as no engine is needed: its target, how many layers fit, what a layer costs."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from snakemake.utils import update_config

from draftsmith import get_target
from draftsmith.config import check_consistent, parse
from draftsmith.target_weights import loaded_bytes

MODULES = ("kimi_target", "kimi_figures", "extraction_engine", "shapes", "spread_experts")
GIB = 2**30
# Bytes of a layer with experts by the tensors of the published checkpoint: INT4 and a bfloat16 scale for 32 of them, all else
# bfloat16; norms are left out.
EXPERTS = 384 * 3 * (7168 * 2048 // 2 + 7168 * 2048 // 32 * 2)
ATTENTION = 2 * (1536 * 7168 + 12288 * 1536 + 576 * 7168 + 16384 * 512 + 7168 * 8192)
LAYER = EXPERTS + ATTENTION + 2 * (3 * 7168 * 2048 + 384 * 7168)
FIRST = ATTENTION + 2 * 3 * 7168 * 18432
ENDS = 2 * 2 * 163840 * 7168


@pytest.fixture
def kimi(repo: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The modules; their folder goes behind all others on the path, as it has a tokenize.py."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(repo / "benchmarks")])
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    for name in MODULES:
        sys.modules.pop(name, None)


def test_the_target_is_the_published_one(kimi: SimpleNamespace) -> None:
    whole = kimi.kimi_target.config(61)
    assert whole["architectures"] == ["KimiK25ForConditionalGeneration"]
    text = whole["text_config"]
    names = (
        "num_hidden_layers",
        "n_routed_experts",
        "num_experts_per_tok",
        "hidden_size",
        "num_attention_heads",
        "vocab_size",
    )
    assert [text[name] for name in names] == [61, 384, 8, 7168, 64, 163840]
    latent = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    assert [text[name] for name in latent] == [1536, 512, 128, 64, 128]
    assert (text["rope_scaling"]["type"], text["rope_scaling"]["factor"], text["rope_theta"]) == ("yarn", 64.0, 50000.0)
    weights = text["quantization_config"]["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["group_size"], weights["strategy"]) == (4, 32, "group")
    four = kimi.kimi_target.config(4)
    assert four == whole | {"text_config": text | {"num_hidden_layers": 4}}
    # The language model alone is the same one, under the name of its class.
    alone = kimi.kimi_target.config(61, "text")
    assert alone == text | {"model_type": "deepseek_v3", "head_dim": 64}
    assert alone["architectures"] == ["DeepseekV3ForCausalLM"]


def test_transformers_reads_it(kimi: SimpleNamespace) -> None:
    from transformers import AutoConfig

    values = kimi.kimi_target.config(22)
    read = AutoConfig.for_model(
        values["model_type"], **{name: value for name, value in values.items() if name != "model_type"}
    )
    text = read.get_text_config()
    assert (text.num_hidden_layers, text.n_routed_experts, text.rope_parameters["rope_type"]) == (22, 384, "yarn")
    assert read.image_token_id == 163605
    assert read.tie_word_embeddings is False


@pytest.mark.parametrize(
    ("count", "ids"), [(61, [2, 30, 58]), (22, [2, 11, 19]), (7, [2, 3, 4]), (6, [3, 4, 5]), (4, [1, 2, 3])]
)
def test_layers_that_are_captured(kimi: SimpleNamespace, count: int, ids: list[int]) -> None:
    assert kimi.kimi_target.layer_ids(count) == ids


def test_layers_that_fit_by_hand(kimi: SimpleNamespace) -> None:
    fit = kimi.kimi_target.layers_that_fit
    # Two steps of states, the KV cache, a step; and one more layer, as its experts are repacked.
    besides = 2 * 16384 * 57344 + 8 * GIB + 8 * GIB

    def held(count: int, tp: int) -> float:
        return (ENDS + FIRST + (count - 1) * LAYER + LAYER) / tp + besides

    for count, tp in ((4, 2), (22, 2), (61, 8)):
        assert kimi.kimi_target.held(count, tp) == pytest.approx(held(count, tp), abs=2)
    room = 0.9 * 139 * GIB
    two = fit(139 * GIB, 2)
    assert held(two, 2) <= room < held(two + 1, 2)
    assert 15 < two < 30
    assert fit(139 * GIB, 8) == 61
    # Four layers of three engines beside one another on two GPUs, but not the whole target on eight.
    assert fit(139 * GIB, 2, 3) >= 4
    assert fit(139 * GIB, 8, 3) < 61
    assert fit(24 * GIB, 2) == 0


def test_the_workflow_takes_the_hollow_folder(kimi: SimpleNamespace, repo: Path, tmp_path: Path) -> None:
    told = kimi.kimi_target.write(tmp_path / "hollow", 5, "whole", False, checkpoint=True)
    described = get_target.describe(tmp_path / "hollow", source="hollow", revision=None, trust_remote_code=False)
    assert (described["num_layers"], described["hidden_size"], described["multimodal"]) == (5, 7168, True)
    assert {name: described[name] for name in ("architectures", "torch_dtype")} == {
        name: told[name] for name in ("architectures", "torch_dtype")
    }
    # What would have to be loaded, without a byte of it on the disk.
    assert loaded_bytes(tmp_path / "hollow", "bfloat16") == pytest.approx(ENDS + FIRST + 4 * LAYER, abs=1)
    assert (tmp_path / "hollow/model.safetensors").stat().st_blocks * 512 < 1 << 20
    values: dict[str, Any] = yaml.safe_load((repo / "config/kimi-k2.5.yaml").read_text())
    update_config(values, yaml.safe_load(kimi.kimi_target.overlay(tmp_path / "hollow", 5, 2, kimi.kimi_target.DATA)))
    made = parse(values, "overlay")
    check_consistent(made, "overlay")
    assert (made.engine.tp, made.target.layers, made.regenerate.enabled, made.preflight.dry_run) == (
        2,
        [2, 3, 4],
        False,
        True,
    )
    # All else is as the cluster's config has it.
    assert (made.engine.max_num_batched_tokens, made.tokenize.max_length) == (16384, 4096)


def a_pass(layers: int, way: str, seconds: float, prompts: int = 512, written: int = 0) -> dict[str, Any]:
    return {
        "record": "pass", "layers": layers, "way": way, "prompts": prompts, "tokens": 61000, "seconds": seconds,
        "tokens_per_second": 61000 / seconds, "bytes": written,
    }  # fmt: skip


def an_engine(layers: int, way: str, seconds: float) -> dict[str, Any]:
    return {
        "record": "engine", "layers": layers, "way": way, "start_seconds": seconds, "startup": {"import": 9.0, "attach": 1.5},
        "by_log": {"weights": 3.25}, "peak_gpu_gb": [20.5, 19.25], "peak_host_gb": 7.5,
    }  # fmt: skip


def test_what_a_layer_costs_by_hand(kimi: SimpleNamespace) -> None:
    records = [
        a_pass(4, "plain", 2.0), a_pass(4, "ours", 2.5, written=4 * 10**9), an_engine(4, "plain", 30.0),
        # Cut off, and measured again: the later one counts.
        a_pass(24, "plain", 99.0),
        a_pass(24, "plain", 12.0), an_engine(24, "plain", 50.0), {"record": "failed", "layers": 24, "way": "connector"},
    ]  # fmt: skip
    found = kimi.kimi_figures.slopes(records, (4, 24), 61)
    # 10 s for 20 layers: half a second each, 37 more would take 12 + 18.5 s.
    assert found == [
        {
            "way": "plain", "prompts": 512, "seconds_per_layer": 0.5, "microseconds_per_token_and_layer": round(0.5e6 / 61000, 4),
            "tokens_per_second_at_61_layers": 2000.0,
        },
        {"way": "plain", "start_seconds_per_layer": 1.0, "start_seconds_at_61_layers": 87.0},
    ]  # fmt: skip
    few, deep = kimi.kimi_figures.ratios(records)
    assert (few["layers"], few["ratio_to_prefill"], few["ours_gb_per_second"]) == (4, 0.8, 1.6)
    assert deep["plain_tokens_per_second"] == 61000 / 12
    assert "ratio_to_prefill" not in deep
    assert kimi.kimi_figures.finished(records) == {(4, "plain"), (24, "plain")}


def test_no_slope_where_the_layers_are_not_what_is_timed(kimi: SimpleNamespace) -> None:
    """To a disk four layers take what the disk takes; and whoever starts first on a machine compiles for all."""
    records = [
        a_pass(4, "disk", 8.0), a_pass(11, "disk", 10.0), a_pass(4, "ours", 3.0), a_pass(11, "ours", 10.0),
        an_engine(4, "ours", 120.0), an_engine(11, "ours", 31.0),
    ]  # fmt: skip
    (found,) = kimi.kimi_figures.slopes(records, (4, 11), 61)
    assert (found["way"], found["seconds_per_layer"], found["tokens_per_second_at_61_layers"]) == (
        "ours",
        1.0,
        round(61000 / 60, 1),
    )
    lines = kimi.kimi_figures.tables(records, (4, 11), 61).splitlines()
    assert [line for line in lines if line.startswith("| disk")] == []


def test_tables_as_the_results_have_them(kimi: SimpleNamespace) -> None:
    records = [
        a_pass(4, "plain", 2.0), a_pass(4, "ours", 2.5, written=4 * 10**9), an_engine(4, "ours", 30.0), a_pass(24, "plain", 12.0),
    ]  # fmt: skip
    lines = kimi.kimi_figures.tables(json.loads(json.dumps(records)), (4, 24), 61).splitlines()
    assert "| 4 | 512 | 30,500 | 24,400 | 0.8 |  |  |  |  | 1.6 |  |" in lines
    assert "| 4 | ours | 30.0 | 9.0 | 3.25 |  | 1.5 | 20.5, 19.25 | 7.5 |" in lines
    assert f"| plain | 512 | 0.5 | {round(0.5e6 / 61000, 4)} | 2,000 |" in lines
    heads = [line for line in lines if line.startswith(("| layers", "| way"))]
    assert [line.count("|") for line in heads] == [12, 10, 6]


def test_dummy_gates_use_all_experts(kimi: SimpleNamespace) -> None:
    """As vLLM draws them, every token goes to the same experts; drawn anew, a step's tokens go to all about alike."""
    import torch

    class Gate(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(384, 7168, dtype=torch.bfloat16).uniform_(-1e-3, 1e-3))
            self.e_score_correction_bias = torch.nn.Parameter(torch.empty(384).uniform_(-1e-3, 1e-3))

    torch.manual_seed(0)
    model = torch.nn.Sequential(Gate(), torch.nn.Linear(4, 4), Gate())
    # What a norm with dummy weights makes of dummy embeddings.
    states = torch.randn(1024, 7168) * torch.empty(7168).uniform_(-1e-3, 1e-3)

    def tokens_of_each_expert(gate: Any) -> torch.Tensor:
        scores = (states @ gate.weight.float().T).sigmoid() + gate.e_score_correction_bias
        return scores.topk(8).indices.flatten().bincount(minlength=384)

    assert (tokens_of_each_expert(model[0]) > 0).sum() < 20
    assert kimi.spread_experts.spread(model) == 2
    for gate in (model[0], model[2]):
        # 1,024 x 8 / 384 = 21 for each.
        found = tokens_of_each_expert(gate)
        assert found.min() > 2
        assert found.max() < 60
    assert not torch.equal(model[0].weight, model[2].weight)
    # Ranks have to agree.
    again = Gate()
    kimi.spread_experts.spread(torch.nn.Sequential(again))
    assert torch.equal(again.weight, model[0].weight)


def test_conversations_are_of_the_length_that_is_said(kimi: SimpleNamespace, tmp_path: Path) -> None:
    """A token a byte; the template adds some, and a row may have 4,096."""
    kimi.kimi_target.conversations(tmp_path / "long.jsonl", 100)
    made = [json.loads(line)["messages"] for line in (tmp_path / "long.jsonl").read_text().splitlines()]
    lengths = [sum(len(turn["content"].encode()) for turn in turns) for turns in made]
    assert len(lengths) == 100
    assert min(lengths) > 2900
    assert max(lengths) < 4000
    assert len({turns[0]["content"] for turns in made}) == 100
