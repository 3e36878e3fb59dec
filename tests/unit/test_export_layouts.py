"""The layouts beside vLLM's: tensors, keys, and what a server of each could not run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.draft.config import DraftShape
from draftsmith.draft.initial import initial_draft
from draftsmith.draft.latent import Latent
from draftsmith.draft.warm_start import warm_weights
from draftsmith.errors import DraftsmithError
from draftsmith.export_draft.layouts import check_layouts, write_layout
from draftsmith.export_draft.tensors import exported_tensors

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32}
# Width 16 with 4 heads of 8 on 2 key heads; the residual as SGLang and EAGLE have it.
SHAPE = DraftShape(
    hidden_size=16, heads=4, kv_heads=2, head_dim=8, intermediate_size=24, rms_norm_eps=1e-6, rope=YARN, max_positions=128,
    target_vocab=40, draft_vocab=12, layers=(2, 3, 5), norm_before_residual=False, fc_norm=False, norm_output=False,
)  # fmt: skip
D2T = torch.arange(12) * 2


def _tensors(shape: DraftShape, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    head = torch.randn(40, 16, generator=torch.Generator().manual_seed(0))
    d2t = D2T if shape.draft_vocab == 12 else torch.zeros(40, dtype=torch.int64)
    return exported_tensors(initial_draft(shape, head[:0], head, d2t, seed=3).state_dict(), shape, d2t, dtype)


def _written(layout: str, folder: Path, shape: DraftShape = SHAPE) -> tuple[dict[str, Tensor], dict[str, object]]:
    write_layout(layout, folder, _tensors(shape), shape, "bfloat16")
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("layout", ["sglang", "hf"])
def test_tensors_are_those_that_its_readers_name(layout: str, tmp_path: Path) -> None:
    tensors, _ = _written(layout, tmp_path)
    projections = {"self_attn." + name for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    projections |= {"mlp." + name for name in ("gate_proj", "up_proj", "down_proj")}
    layer = projections | {"input_layernorm", "hidden_norm", "post_attention_layernorm"}
    rest = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert set(tensors) == {f"midlayer.{name}.weight" for name in layer} | rest


@pytest.mark.parametrize(("layout", "ids"), [("sglang", [1, 2, 4]), ("hf", [2, 3, 5])])
def test_layer_ids_are_as_its_reader_counts_them(layout: str, ids: list[int], tmp_path: Path) -> None:
    """SGLang's k is the output of layer k, which is the input of layer k + 1."""
    _, settings = _written(layout, tmp_path)
    assert settings["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}


@pytest.mark.parametrize("layout", ["sglang", "hf"])
def test_config_keys(layout: str, tmp_path: Path) -> None:
    _, settings = _written(layout, tmp_path)
    wanted = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 24, "vocab_size": 40,
        "draft_vocab_size": 12, "tie_word_embeddings": False, "max_position_embeddings": 128, "norm_before_residual": False,
        "fc_norm": False, "norm_output": False, "bias": False, "torch_dtype": "bfloat16", "rope_theta": 1e6, "rope_parameters": YARN,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    }  # fmt: skip
    assert {name: settings.get(name) for name in wanted} == wanted


@pytest.mark.parametrize("layout", ["sglang", "hf"])
def test_transformers_turns_it_into_the_same_rope(layout: str, tmp_path: Path) -> None:
    """A reader of config.json computes the angles that training computed."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    _written(layout, tmp_path)
    read = LlamaRotaryEmbedding(LlamaConfig.from_pretrained(tmp_path))
    trained = LlamaRotaryEmbedding(SHAPE.llama())
    plain = LlamaRotaryEmbedding(replace(SHAPE, rope={"rope_type": "default", "rope_theta": 1e6}).llama())
    assert torch.equal(read.inv_freq, trained.inv_freq)
    assert read.attention_scaling == trained.attention_scaling
    assert not torch.equal(read.inv_freq, plain.inv_freq)


@pytest.mark.parametrize("layout", ["sglang", "hf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_warm_start_reads_the_same_bits_back(layout: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = _tensors(SHAPE, dtype)
    write_layout(layout, tmp_path, tensors, SHAPE, str(dtype).removeprefix("torch."))
    weights = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    read = warm_weights(tmp_path, SHAPE, D2T, torch.empty(0, 16), weights)
    assert set(read) == set(weights)
    for name, tensor in weights.items():
        assert torch.equal(read[name].to(dtype), tensor), name


@pytest.mark.parametrize("layout", ["sglang", "hf"])
def test_switches_of_eagle_3_1_are_written(layout: str, tmp_path: Path) -> None:
    shape = replace(SHAPE, fc_norm=True, norm_output=True, norm_before_residual=layout == "hf")
    check_layouts([layout], shape)
    tensors, settings = _written(layout, tmp_path, shape)
    assert {f"fc_norm.{number}.weight" for number in range(3)} <= set(tensors)
    assert (settings["fc_norm"], settings["norm_output"]) == (True, True)
    assert settings["norm_before_residual"] is (layout == "hf")


@pytest.mark.parametrize(
    ("layout", "changes", "newer"),
    [
        ("sglang", {}, False),
        ("sglang", {"fc_norm": True}, True),
        ("sglang", {"norm_output": True}, True),
        ("sglang", {"layers": (2, 5)}, True),
        ("hf", {"norm_output": True}, False),
    ],
)
def test_what_only_newer_versions_of_sglang_read_is_told(
    layout: str, changes: Mapping[str, object], newer: bool, tmp_path: Path
) -> None:
    """Two layers are two widths of fc, which the reader learns from num_aux_hidden_states."""
    shape = replace(SHAPE, **changes)  # type: ignore[arg-type]
    check_layouts([layout], shape)
    told = write_layout(layout, tmp_path, _tensors(shape), shape, "bfloat16")
    assert told.endswith("for SGLang 0.5.12 or newer") is newer
    assert json.loads((tmp_path / "config.json").read_text())["num_aux_hidden_states"] == len(shape.layers)


def test_whole_vocabulary_has_no_mapping(tmp_path: Path) -> None:
    tensors, settings = _written("sglang", tmp_path, replace(SHAPE, draft_vocab=40))
    assert not {"d2t", "t2d"} & set(tensors)
    assert settings["draft_vocab_size"] == 40


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"norm_before_residual": True},
            r"norm_before_residual were false; train with train\.norm_before_residual: false",
        ),
        ({"attention_window": 8}, r"train\.attention_window"),
        ({"layers": (0, 3, 5)}, r"target\.layers"),
    ],
)
def test_what_sglang_runs_otherwise_is_refused(changes: Mapping[str, object], named: str) -> None:
    shape = replace(SHAPE, **changes)  # type: ignore[arg-type]
    with pytest.raises(DraftsmithError, match=named):
        check_layouts(["sglang"], shape)
    check_layouts(["hf"], shape)


def test_latent_attention_goes_to_sglang(tmp_path: Path) -> None:
    """kimi_k25_eagle3.py joins the two first steps itself, takes ``midlayer`` as it stands, and counts the layers in eagle_config."""
    latent = Latent(q_lora_rank=6, kv_lora_rank=10, qk_nope_head_dim=4, qk_rope_head_dim=8, v_head_dim=8)
    rope = YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    shape = replace(SHAPE, kv_heads=4, head_dim=12, latent=latent, rope=rope)
    check_layouts(["sglang"], shape)
    assert write_layout("sglang", tmp_path, _tensors(shape), shape, "bfloat16").endswith("for SGLang 0.5.12 or newer")
    settings = json.loads((tmp_path / "config.json").read_text())
    assert (settings["architectures"], settings["q_lora_rank"]) == (["Eagle3DeepseekV2ForCausalLM"], 6)
    assert settings["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    names = set(load_file(tmp_path / "model.safetensors"))
    assert {f"midlayer.self_attn.{name}.weight" for name in ("q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj")} <= names
    with pytest.raises(DraftsmithError, match="leave hf out"):
        check_layouts(["hf"], shape)


def test_a_tensor_that_no_server_loads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DraftsmithError, match=r"has \['surplus'\]"):
        write_layout("hf", tmp_path, _tensors(SHAPE) | {"surplus": torch.ones(2)}, SHAPE, "bfloat16")
