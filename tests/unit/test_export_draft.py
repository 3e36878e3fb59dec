"""The exported draft: tensors, config.json as vLLM reads it, refusals."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from draftsmith import export_draft
from draftsmith.config import Config, parse
from draftsmith.draft.config import draft_shape
from draftsmith.draft.initial import initial_draft
from draftsmith.draft.trained_as import KEY, trained_as
from draftsmith.errors import DraftsmithError
from ropes import LLAMA3

REPORT: dict[str, Any] = {
    "fingerprint": "0123456789abcdef",
    "steps": 12,
    "epochs": 3.0,
    "params": 4321,
    "tokens": 999,
    "simulated_acceptance_length": 1.75,
    "acceptance": [0.5, 0.4, 0.25],
}


class Export:
    """What the stage is given; tensors may be changed before it runs."""

    def __init__(self, folder: Path, draft_vocab: int = 20, layers: tuple[int, ...] = (1, 3), **train: Any) -> None:
        self.folder = folder
        self.config: Config = parse({"train": {"ttt_steps": 3} | train, "export": {"speculative_tokens": 4}}, "test")
        torch.manual_seed(0)
        target = folder / "target"
        target.mkdir()
        self.head = torch.randn(64, 32, dtype=torch.bfloat16)
        save_file(
            {"lm_head.weight": self.head, "model.embed_tokens.weight": self.head + 1}, target / "model.safetensors"
        )
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "vocab_size": 64}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024}
        config = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_parameters": LLAMA3} | sizes | heads
        (target / "config.json").write_text(json.dumps(config))
        self.target: dict[str, Any] = {
            "source": str(target),
            "revision": None,
            "path": str(target),
            "architectures": ["LlamaForCausalLM"],
            "num_layers": 6,
            "hidden_size": 32,
            "vocab_size": 64,
            "max_positions": 1024,
            "layers": list(layers),
            "torch_dtype": "bfloat16",
            "fingerprint": "f" * 64,
            "trust_remote_code": False,
        }
        ids = torch.arange(draft_vocab) * (64 // draft_vocab)
        self.d2t = ids - torch.arange(draft_vocab)
        save_file({"d2t": self.d2t}, folder / "vocabulary.safetensors")
        shape = draft_shape(self.target, self.config.train, draft_vocab)
        self.weights = dict(initial_draft(shape, self.head, self.head, self.d2t, seed=1).state_dict())
        self.report = REPORT | {"layers": list(layers)}
        self.metadata = {
            "fingerprint": REPORT["fingerprint"],
            KEY: json.dumps(trained_as(shape, self.d2t, self.target)),
        }
        del self.target["layers"]

    def run(self) -> Path:
        """Run the stage; the folder it wrote."""
        self.write()
        return self.export()

    def write(self) -> None:
        """Write what earlier stages leave."""
        (self.folder / "target.json").write_text(json.dumps(self.target))
        (self.folder / "train.json").write_text(json.dumps(self.report))
        save_file(self.weights, self.folder / "draft.safetensors", metadata=self.metadata)

    def export(self) -> Path:
        """Run the stage on the files that are there."""
        out = self.folder / "draft"
        export_draft.run(
            self.config,
            target=self.folder / "target.json",
            draft=self.folder / "draft.safetensors",
            vocabulary=self.folder / "vocabulary.safetensors",
            train_report=self.folder / "train.json",
            folder=out,
            report=out / "export.json",
        )
        return out


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Export]:
    return lambda **changes: Export(tmp_path, **changes)


def test_tensors(make: Callable[..., Export]) -> None:
    export = make()
    tensors = load_file(export.run() / "model.safetensors")
    # 2 layers x 32 into fc; 4 heads of 16 take 2 x 32; 2 key heads.
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()} == {
        "fc.weight": ((32, 64), torch.bfloat16),
        "layers.0.input_layernorm.weight": ((32,), torch.bfloat16),
        "layers.0.hidden_norm.weight": ((32,), torch.bfloat16),
        "layers.0.post_attention_layernorm.weight": ((32,), torch.bfloat16),
        "layers.0.self_attn.q_proj.weight": ((64, 64), torch.bfloat16),
        "layers.0.self_attn.k_proj.weight": ((32, 64), torch.bfloat16),
        "layers.0.self_attn.v_proj.weight": ((32, 64), torch.bfloat16),
        "layers.0.self_attn.o_proj.weight": ((32, 64), torch.bfloat16),
        "layers.0.mlp.gate_proj.weight": ((48, 32), torch.bfloat16),
        "layers.0.mlp.up_proj.weight": ((48, 32), torch.bfloat16),
        "layers.0.mlp.down_proj.weight": ((32, 48), torch.bfloat16),
        "norm.weight": ((32,), torch.bfloat16),
        "lm_head.weight": ((20, 32), torch.bfloat16),
        "d2t": ((20,), torch.int64),
        "t2d": ((64,), torch.bool),
    }
    # Every third token: 0 3 6 .. 57; draft id 2 is target id 2 + 4.
    assert tensors["d2t"].tolist() == [2 * number for number in range(20)]
    assert tensors["t2d"].nonzero().squeeze(1).tolist() == list(range(0, 60, 3))
    torch.testing.assert_close(tensors["lm_head.weight"], export.head[::3][:20])


def test_config_as_vllm_reads_it(make: Callable[..., Export]) -> None:
    """vLLM's own updater, which has no imports and runs without the rest of vLLM."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    source = Path(spec.origin).parent / "transformers_utils/configs/speculators/algos.py"
    module_spec = importlib.util.spec_from_file_location("vllm_speculators_algos", source)
    assert module_spec is not None
    assert module_spec.loader is not None
    algos = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(algos)
    config = json.loads((make(norm_before_residual=False, fc_norm=True).run() / "config.json").read_text())
    read = dict(config["transformer_layer_config"])
    algos.SUPPORTED_SPECULATORS_TYPES[config["speculators_model_type"]](config_dict=config, pre_trained_config=read)
    assert read["architectures"] == ["Eagle3LlamaForCausalLM"]
    flags = {name: read[name] for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")}
    assert flags == {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": True, "norm_output": False}
    assert read["eagle_aux_hidden_state_layer_ids"] == [1, 3]
    assert read["num_aux_hidden_states"] == 2
    assert (read["draft_vocab_size"], read["vocab_size"]) == (20, 64)
    assert read["rope_parameters"] == LLAMA3
    assert (read["max_position_embeddings"], read["head_dim"], read["rms_norm_eps"]) == (1024, 16, 1e-5)


def test_a_window_is_said_as_vllms_llama_attention_asks_for_it(make: Callable[..., Export]) -> None:
    """One kind a layer of the draft, and the size; without a window neither, which is full attention."""
    export = make(attention_window=512)
    export.config.export.layouts = ["hf"]
    out = export.run()
    layer = json.loads((out / "config.json").read_text())["transformer_layer_config"]
    for keys in (layer, json.loads((out / "hf" / "config.json").read_text())):
        assert (keys["layer_types"], keys["sliding_window"]) == (["sliding_attention"], 512)
        assert len(keys["layer_types"]) == keys["num_hidden_layers"]
    assert "| attention window | 512 positions |" in (out / "README.md").read_text()


def test_without_a_window_nothing_is_said_of_one(make: Callable[..., Export]) -> None:
    out = make().run()
    assert not {"layer_types", "sliding_window"} & set(
        json.loads((out / "config.json").read_text())["transformer_layer_config"]
    )
    assert "attention window" not in (out / "README.md").read_text()


def test_config_names_the_target_and_the_draft_length(make: Callable[..., Export]) -> None:
    export = make()
    config = json.loads((export.run() / "config.json").read_text())
    speculators = config["speculators_config"]
    assert speculators["proposal_methods"][0]["speculative_tokens"] == 4
    assert speculators["verifier"] == {
        "name_or_path": str(export.folder / "target"),
        "architectures": ["LlamaForCausalLM"],
    }


def test_hub_target_is_named_by_its_id() -> None:
    hub = {"source": "org/model", "revision": "abc", "path": "/cache/snapshots/abc"}
    assert export_draft.verifier(hub) == "org/model"
    assert export_draft.verifier({"source": "package:x", "revision": None, "path": "/cache/x"}) == "/cache/x"


def test_whole_vocabulary_has_no_mapping(make: Callable[..., Export]) -> None:
    tensors = load_file(make(draft_vocab=64).run() / "model.safetensors")
    assert "d2t" not in tensors
    assert tensors["lm_head.weight"].shape == (64, 32)


def test_dtype_can_be_chosen(make: Callable[..., Export]) -> None:
    export = make()
    export.config.export.dtype = "float32"
    out = export.run()
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
    assert load_file(out / "model.safetensors")["fc.weight"].dtype == torch.float32


def test_report_and_card(make: Callable[..., Export]) -> None:
    out = make().run()
    report = json.loads((out / "export.json").read_text())
    assert report["fingerprint"] == REPORT["fingerprint"]
    assert {entry["status"] for entry in report["checks"]} == {"ok"}
    assert [entry["name"] for entry in report["checks"]][:2] == ["tensor names", "tensor shapes"]
    card = (out / "README.md").read_text()
    for part in ("f" * 64, REPORT["fingerprint"], "1.750", "50.0% / 40.0% / 25.0%", "20 of 64 tokens", "1, 3 of 6"):
        assert part in card


def test_asked_layouts_lie_in_folders_of_their_own_and_those_of_before_go(make: Callable[..., Export]) -> None:
    export = make(layers=(1, 3, 4), norm_before_residual=False)
    export.config.export.layouts = ["sglang", "hf"]
    out = export.run()
    assert [entry["name"] for entry in json.loads((out / "export.json").read_text())["checks"]][-2:] == [
        "layout sglang",
        "layout hf",
    ]
    assert torch.equal(
        load_file(out / "sglang/model.safetensors")["midlayer.mlp.up_proj.weight"],
        load_file(out / "model.safetensors")["layers.0.mlp.up_proj.weight"],
    )
    export.config.export.layouts = ["hf"]
    export.run()
    assert not (out / "sglang").exists()
    assert (out / "hf/config.json").is_file()


def test_layout_that_cannot_run_the_draft_leaves_nothing(make: Callable[..., Export]) -> None:
    export = make(layers=(1, 3, 4))
    export.config.export.layouts = ["sglang"]
    with pytest.raises(DraftsmithError, match="norm_before_residual"):
        export.run()
    assert not (export.folder / "draft").exists()


def test_untrained_draft_of_a_warm_start_is_its_source(make: Callable[..., Export]) -> None:
    """What training began with, so that the gain of training is what the comparison shows."""
    export = make()
    source = export.run()
    export.config.train.initial_draft = str(source)
    paths = {"target": export.folder / "target.json", "vocabulary": export.folder / "vocabulary.safetensors"}
    export_draft.untrained(export.config, **paths, layers=[1, 3], folder=export.folder / "first")
    first, of_source = load_file(export.folder / "first/model.safetensors"), load_file(source / "model.safetensors")
    assert first.keys() == of_source.keys()
    assert all(torch.equal(first[name], of_source[name]) for name in first)


def test_a_report_without_shares_by_position_has_a_card(make: Callable[..., Export]) -> None:
    export = make()
    del export.report["acceptance"]
    assert "1.750" in (export.run() / "README.md").read_text()


def test_export_of_no_validation_has_a_card(make: Callable[..., Export]) -> None:
    export = make()
    export.report |= {"simulated_acceptance_length": None, "acceptance": None}
    assert "simulated acceptance length" not in (export.run() / "README.md").read_text()


def _drop_head(weights: dict[str, torch.Tensor]) -> None:
    del weights["lm_head.weight"]


def _add_embedding(weights: dict[str, torch.Tensor]) -> None:
    weights["embed_tokens.weight"] = torch.ones(64, 32)


def _narrow_fc(weights: dict[str, torch.Tensor]) -> None:
    weights["fc.weight"] = weights["fc.weight"][:, :32].contiguous()


def _poison(weights: dict[str, torch.Tensor]) -> None:
    weights["layers.0.mlp.up_proj.weight"][3, 4] = float("inf")


def _empty(weights: dict[str, torch.Tensor]) -> None:
    weights["norm.weight"].zero_()


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_drop_head, "lm_head"),
        (_add_embedding, "embed_tokens"),
        (_narrow_fc, r"fc\.weight is \[32, 32\] and must be \[32, 64\]"),
        (_poison, "up_proj.* not finite"),
        (_empty, r"norm\.weight is all zero"),
    ],
)
def test_unusable_weights_are_refused(
    damage: Callable[[dict[str, torch.Tensor]], None], named: str, make: Callable[..., Export]
) -> None:
    export = make()
    damage(export.weights)
    with pytest.raises(DraftsmithError, match=named):
        export.run()


@pytest.mark.parametrize("layers", [(1, 6), (1, 1), (3, 1)])
def test_layers_that_no_target_has_are_refused(layers: tuple[int, ...], make: Callable[..., Export]) -> None:
    with pytest.raises(DraftsmithError, match="layers"):
        make(layers=layers).run()


def test_report_of_another_training_is_refused(make: Callable[..., Export]) -> None:
    export = make()
    export.report["fingerprint"] = "another"
    with pytest.raises(DraftsmithError, match="another"):
        export.run()


def test_untrained_draft_depends_on_the_seed_alone(make: Callable[..., Export]) -> None:
    export = make()
    (export.folder / "target.json").write_text(json.dumps(export.target))

    def weights(name: str) -> dict[str, torch.Tensor]:
        paths = {"target": export.folder / "target.json", "vocabulary": export.folder / "vocabulary.safetensors"}
        export_draft.untrained(export.config, **paths, layers=[1, 3], folder=export.folder / name)
        return load_file(export.folder / name / "model.safetensors")

    first, second = weights("one"), weights("two")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert bool((first["norm.weight"] == 1).all())
    export.config.train.seed = 5
    assert not torch.equal(weights("three")["fc.weight"], first["fc.weight"])


def _others(export: Export, **train: Any) -> None:
    export.config = parse({"train": {"ttt_steps": 3} | train}, "test")


def _other_tokens(export: Export) -> None:
    """As many, and each the one after."""
    save_file({"d2t": export.d2t + 1}, export.folder / "vocabulary.safetensors")


def _other_rope(export: Export) -> None:
    path = export.folder / "target/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_parameters": LLAMA3 | {"factor": 4.0}}))


OTHERS: list[tuple[Callable[[Export], Any], str]] = [
    (
        lambda export: _others(export, norm_before_residual=False),
        r"train\.norm_before_residual: true, and the config gives false; set train\.norm_before_residual: true, or run train_draft",
    ),
    (lambda export: _others(export, norm_output=True), r"train\.norm_output: false, .* set train\.norm_output: false"),
    (lambda export: _others(export, fc_norm=True), r"train\.fc_norm: false, .* set train\.fc_norm: false"),
    (lambda export: _others(export, attention_window=8), r"train\.attention_window: null, and the config gives 8"),
    (lambda export: _others(export, intermediate_size=64), r"train\.intermediate_size: 48, and the config gives 64"),
    (_other_tokens, r"\(d2t\) than .*vocabulary\.safetensors names; give the vocabulary\.safetensors of that training"),
    (_other_rope, r"with rope .*\"factor\": 8\.0.* gives .*\"factor\": 4\.0"),
    (lambda export: export.target.update(fingerprint="e" * 64), r"for the target \"f+\", .* give the target\.json"),
    (lambda export: export.report.update(layers=[1, 4]), r"on the layers \[1, 3\], and .*train\.json says \[1, 4\]"),
]


@pytest.mark.parametrize(("change", "named"), OTHERS)
def test_what_training_did_otherwise_is_refused_and_nothing_written(
    change: Callable[[Export], Any], named: str, make: Callable[..., Export]
) -> None:
    export = make()
    change(export)
    with pytest.raises(DraftsmithError, match=rf"draft\.safetensors was trained [^\n]*{named}"):
        export.run()
    assert not (export.folder / "draft").exists()


def test_a_draft_of_an_earlier_version_tells_nothing_and_is_exported(make: Callable[..., Export]) -> None:
    export = make()
    del export.metadata[KEY]
    _others(export, norm_before_residual=False)
    assert not json.loads((export.run() / "config.json").read_text())["norm_before_residual"]


def _fails_after(count: int, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [count]

    def save(tensors: Any, path: Path, metadata: Any = None) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise error
        save_file(tensors, path, metadata)

    monkeypatch.setattr("safetensors.torch.save_file", save)


@pytest.mark.parametrize(
    ("count", "error"),
    [
        (0, SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")),
        (1, OSError(28, "No space left on device")),
    ],
)
def test_a_full_disk_is_told_in_one_sentence(
    count: int, error: Exception, make: Callable[..., Export], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the main folder is written, and while a layout beside it is."""
    export = make()
    export.config.export.layouts = ["hf"]
    export.write()
    _fails_after(count, error, monkeypatch)
    with pytest.raises(
        DraftsmithError, match=r"/draft: cannot be written \([^\n]*No space left[^\n]*make room there"
    ) as told:
        export.export()
    assert "run export_draft again" in str(told.value)


def test_a_folder_that_is_a_file_is_named(make: Callable[..., Export]) -> None:
    export = make()
    (export.folder / "draft").touch()
    with pytest.raises(DraftsmithError, match=r"/draft: cannot be written \(File exists\)"):
        export.run()


def _cut_draft(folder: Path) -> None:
    path = folder / "draft.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def _without_layers(folder: Path) -> None:
    path = folder / "train.json"
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "layers"}))


DAMAGED: list[tuple[Callable[[Path], Any], str]] = [
    (_cut_draft, r"draft\.safetensors: the trained draft cannot be read .* run train_draft again"),
    (
        lambda folder: (folder / "draft.safetensors").unlink(),
        r"draft\.safetensors: the trained draft cannot be read .*No such",
    ),
    (_without_layers, r"train\.json: lacks layers; delete it and run its stage again"),
    (lambda folder: (folder / "target.json").write_text("[]"), r"target\.json: holds no JSON object"),
    (lambda folder: (folder / "target.json").write_text("{}"), r"target\.json: lacks source, path, fingerprint, arch"),
]


@pytest.mark.parametrize(("damage", "named"), DAMAGED)
def test_a_damaged_input_is_named(damage: Callable[[Path], Any], named: str, make: Callable[..., Export]) -> None:
    export = make()
    export.write()
    damage(export.folder)
    with pytest.raises(DraftsmithError, match=named):
        export.export()


def test_the_card_says_what_to_change_where_a_local_target_lies_elsewhere(make: Callable[..., Export]) -> None:
    export = make()
    card = (export.run() / "README.md").read_text()
    assert (
        f"Where the target is not in `{export.folder / 'target'}`, put its folder or hub id there into "
        "`speculators_config.verifier.name_or_path` of config.json"
    ) in card


def test_the_card_of_a_target_on_the_hub_says_nothing_of_folders(make: Callable[..., Export]) -> None:
    export = make()
    export.target |= {"source": "org/model", "revision": "abc"}
    assert "name_or_path" not in (export.run() / "README.md").read_text()
