"""A draft that training goes on from: taken as it is, or refused with the key or tensor that does not fit."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.config import parse
from draftsmith.draft.config import DraftShape
from draftsmith.draft.initial import initial_draft
from draftsmith.draft.warm_start import source_digest, source_vocabulary
from draftsmith.errors import DraftsmithError
from draftsmith.export_draft import draft_config, vocabulary_tensors
from draftsmith.export_draft.layouts import layout_config, layout_name
from draftsmith.train_draft.objective import Objective
from draftsmith.train_draft.packing import Pack

LAYOUTS = ["speculators", "sglang", "hf"]
TARGET = {"source": "org/model", "revision": "1", "path": "/nowhere", "architectures": ["LlamaForCausalLM"]}


class Source:
    """A random draft, and what a folder of it holds before it is written."""

    def __init__(self, folder: Path, shape: DraftShape, make_draft: Callable[..., Any], layout: str) -> None:
        self.folder, self.shape = folder, shape
        self.draft, self.teacher = make_draft(shape, 5)
        self.d2t: Tensor = self.teacher.token_ids - torch.arange(shape.draft_vocab)
        self.tensors = dict(self.draft.state_dict()) | vocabulary_tensors(self.teacher.token_ids, shape.target_vocab)
        if layout == "speculators":
            self.config = draft_config(parse({}, "test"), TARGET, shape, "float32")
        else:
            self.config = layout_config(layout, shape, "float32")
            self.tensors = {layout_name(name): tensor for name, tensor in self.tensors.items()}

    def write(self) -> Path:
        self.folder.mkdir(exist_ok=True)
        (self.folder / "config.json").write_text(json.dumps(self.config))
        save_file(
            {name: tensor.contiguous() for name, tensor in self.tensors.items()}, self.folder / "model.safetensors"
        )
        return self.folder

    def taken(self) -> Any:
        """The draft that training would begin with."""
        return initial_draft(
            self.shape, self.draft.embed_tokens, self.teacher.head, self.d2t, seed=0, source=self.write()
        )


@pytest.fixture
def make_source(
    tmp_path: Path, make_shape: Callable[..., DraftShape], make_draft: Callable[..., Any]
) -> Callable[..., Source]:
    def make(layout: str = "speculators", **changes: Any) -> Source:
        switches: dict[str, Any] = {} if layout == "speculators" else {"norm_before_residual": False}
        return Source(tmp_path / "source", make_shape(**switches | changes), make_draft, layout)

    return make


@pytest.mark.parametrize("layout", LAYOUTS)
def test_first_step_is_the_sources(layout: str, make_source: Callable[..., Source], pack: Pack) -> None:
    """Loss and hits before the first update, of every step, are those of the source on the same rows."""
    source = make_source(layout)

    def measured(draft: Any) -> Any:
        with torch.no_grad():
            return Objective(draft, source.teacher, 3, 0.8, torch.float32)(pack, pack.counts, with_hits=True)

    first, of_source = measured(source.taken()), measured(source.draft)
    new = measured(initial_draft(source.shape, source.draft.embed_tokens, source.teacher.head, source.d2t, seed=0))
    assert torch.equal(first.loss, of_source.loss)
    assert torch.equal(first.sums, of_source.sums)
    assert [hits.tolist() for hits in first.hits] == [hits.tolist() for hits in of_source.hits]
    assert not torch.equal(first.loss, new.loss)


def test_a_pickle_is_refused_and_read_once_the_mend_was_run(make_source: Callable[..., Source]) -> None:
    """With the target's embedding in it, as such files have."""
    source = make_source("hf")
    folder = source.write()
    tensors = source.tensors | {"embed_tokens.weight": source.draft.embed_tokens.bfloat16()}
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    given = (source.shape, source.draft.embed_tokens, source.teacher.head, source.d2t, 0, folder)
    with pytest.raises(DraftsmithError, match="is a pickle, which is not loaded; write it as safetensors") as refused:
        initial_draft(*given)
    mend = str(refused.value).partition("safetensors: python ")[2]
    subprocess.run([sys.executable, *shlex.split(mend)], cwd=folder, check=True)
    taken: Any = initial_draft(*given)
    assert torch.equal(taken.layers[0].mlp.up_proj.weight, source.draft.layers[0].mlp.up_proj.weight)


def test_logit_scale_of_the_source_goes_into_its_head(make_source: Callable[..., Source]) -> None:
    """vLLM multiplies a draft's logits with logit_scale; what is exported here has no such key."""
    source = make_source("hf")
    source.config["logit_scale"] = 0.25
    torch.testing.assert_close(source.taken().lm_head.weight, source.draft.lm_head.weight * 0.25)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("lm_head.weight", None, r"lacks the tensors \['lm_head.weight'\]"),
        ("surplus.weight", torch.ones(2), r"has \['surplus.weight'\]"),
        ("fc.weight", torch.ones(16, 32), r"fc\.weight.*\[16, 32\].*\[16, 48\]; set target\.layers"),
        ("norm.weight", torch.ones(16, dtype=torch.int8), r"norm\.weight.*int8"),
        ("embed_tokens.weight", torch.ones(40, 16), r"embed_tokens\.weight"),
        ("d2t", torch.zeros(12, dtype=torch.int64), r"d2t.*run map_vocabulary again"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    layout: str, name: str, change: Tensor | None, named: str, make_source: Callable[..., Source]
) -> None:
    source = make_source(layout)
    if change is None:
        del source.tensors[name]
    else:
        source.tensors[name] = change
    with pytest.raises(DraftsmithError, match=named) as caught:
        source.taken()
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("train.initial_draft: ")


@pytest.mark.parametrize("switch", ["norm_before_residual", "fc_norm", "norm_output"])
def test_another_switch_is_named_with_its_mend(switch: str, make_source: Callable[..., Source]) -> None:
    source = make_source()
    source.config[switch] = not source.config[switch]
    value = str(source.config[switch]).lower()
    with pytest.raises(DraftsmithError, match=rf"{switch} of .* is {value}; set train\.{switch}: {value}"):
        source.taken()


def test_absent_switches_mean_what_vllm_takes_them_for(make_source: Callable[..., Source]) -> None:
    """norm_before_residual is true by default in speculators' layout and false in the other."""
    source = make_source("speculators", norm_before_residual=True)
    del source.config["norm_before_residual"]
    source.taken()
    source = make_source("hf", norm_before_residual=True)
    del source.config["norm_before_residual"]
    with pytest.raises(DraftsmithError, match=r"train\.norm_before_residual: false"):
        source.taken()


@pytest.mark.parametrize("layout", ["speculators", "hf"])
@pytest.mark.parametrize(
    ("has", "asked", "said"),
    [
        (8, None, "was trained with a window of 8 positions; the draft goes on on the whole context"),
        (None, 4, "was trained on the whole context; the draft goes on with a window of 4 positions"),
        (8, 8, ""),
    ],
)
def test_another_window_is_said_and_taken(
    layout: str, has: int | None, asked: int | None, said: str, make_source: Callable[..., Source],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    source = make_source(layout, attention_window=has)
    source.shape = replace(source.shape, attention_window=asked)
    draft = source.taken()
    assert draft.shape.attention_window == asked
    spoken = "".join(capsys.readouterr())
    assert said in spoken
    assert ("train.attention_window" in spoken) == bool(said)


@pytest.mark.parametrize("key", ["num_attention_heads", "num_key_value_heads", "head_dim"])
def test_other_heads_of_the_same_total_are_refused(key: str, make_source: Callable[..., Source]) -> None:
    source = make_source()
    source.config["transformer_layer_config"][key] *= 2
    with pytest.raises(DraftsmithError, match=key):
        source.taken()


def test_norm_before_fc_is_refused(make_source: Callable[..., Source]) -> None:
    source = make_source()
    source.config["norm_before_fc"] = True
    with pytest.raises(DraftsmithError, match="norm_before_fc"):
        source.taken()


@pytest.mark.parametrize(
    ("layout", "mend"),
    [
        ("speculators", "[1, 2, 7]"),
        ("hf", "[1, 2, 7]"),
        ("sglang", "[1, 2, 7], or [2, 3, 8] if it was made for SGLang"),
    ],
)
def test_other_layers_are_refused(layout: str, mend: str, make_source: Callable[..., Source]) -> None:
    """At the top of the file ids are those of inputs, as vLLM reads them; elsewhere they may be SGLang's, of outputs."""
    source = make_source(layout)
    if layout != "sglang":
        source.config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 7]
    if layout != "speculators":
        source.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 2, 7]
    with pytest.raises(DraftsmithError) as caught:
        source.taken()
    assert str(caught.value).endswith(f"set target.layers: {mend}")


def test_a_folder_without_a_draft_is_named(tmp_path: Path) -> None:
    with pytest.raises(DraftsmithError, match=r"has no config\.json"):
        source_digest(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DraftsmithError, match=r"has no \*\.safetensors"):
        source_digest(tmp_path)


def test_digest_is_of_the_content_alone(make_source: Callable[..., Source]) -> None:
    source = make_source()
    before = source_digest(source.write())
    source.folder = source.folder.with_name("elsewhere")
    assert source_digest(source.write()) == before
    source.tensors["norm.weight"] = source.tensors["norm.weight"].clone()
    source.tensors["norm.weight"][0] += 1e-3
    assert source_digest(source.write()) != before


def test_vocabulary_of_a_source(make_source: Callable[..., Source]) -> None:
    source = make_source()
    folder = source.write()
    assert torch.equal(source_vocabulary(folder, 40), source.teacher.token_ids)
    with pytest.raises(DraftsmithError, match=r"train\.initial_draft: d2t of .* target's 10 tokens"):
        source_vocabulary(folder, 10)
    del source.tensors["d2t"]
    with pytest.raises(DraftsmithError, match=r"has no d2t, and its lm_head gives 12 of the target's 40 tokens"):
        source_vocabulary(source.write(), 40)
    source.tensors["lm_head.weight"] = torch.ones(40, 16)
    assert source_vocabulary(source.write(), 40).tolist() == list(range(40))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_its_map_a_source_is_not_said_to_lack_a_run_of_another_stage(
    layout: str, make_source: Callable[..., Source]
) -> None:
    source = make_source(layout)
    del source.tensors["d2t"]
    with pytest.raises(DraftsmithError, match=r"^train\.initial_draft: .* has no d2t, and its lm_head gives 12 .*\?$"):
        source.taken()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_named_before_the_first_step(
    value: float, make_source: Callable[..., Source]
) -> None:
    source = make_source()
    source.tensors["fc.weight"] = source.tensors["fc.weight"].clone()
    source.tensors["fc.weight"][3, 1] = value
    with pytest.raises(DraftsmithError, match=r"fc\.weight of .* has values that are not finite"):
        source.taken()


def _cut(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100])


def _page_of_a_proxy(folder: Path) -> None:
    (folder / "model.safetensors").write_text("<html>404</html>")


def _lost_part(folder: Path) -> None:
    index = {"weight_map": {"fc.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _index_of_nothing(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


def _list_of_settings(folder: Path) -> None:
    (folder / "config.json").write_text("[1]")


def _half_of_the_settings(folder: Path) -> None:
    (folder / "config.json").write_text('{"a": ')


@pytest.mark.parametrize(
    "harm", [_cut, _page_of_a_proxy, _lost_part, _index_of_nothing, _list_of_settings, _half_of_the_settings]
)
def test_a_damaged_folder_is_one_sentence_with_its_mend(
    harm: Callable[[Path], None], make_source: Callable[..., Source]
) -> None:
    source = make_source()
    folder = source.write()
    harm(folder)
    with pytest.raises(DraftsmithError, match=r"^train\.initial_draft: [^\n]*(copy or fetch|is it all there)[^\n]*$"):
        initial_draft(source.shape, source.draft.embed_tokens, source.teacher.head, source.d2t, 0, folder)


def test_a_tensor_under_two_names_is_refused(make_source: Callable[..., Source]) -> None:
    source = make_source()
    source.tensors["model.norm.weight"] = source.tensors["norm.weight"] * 2
    with pytest.raises(DraftsmithError, match=r"has \['model\.norm\.weight'\] under another name as well"):
        source.taken()


def _layer(source: Source) -> dict[str, Any]:
    layer: dict[str, Any] = source.config["transformer_layer_config"]
    return layer


ODD: list[tuple[str, Callable[[Source], Any], str]] = [
    ("hf", lambda source: source.config.update(eagle_config="x"), "eagle_config .* 'x' and must be an object"),
    ("sglang", lambda source: source.config["eagle_config"].update(eagle_aux_hidden_state_layer_ids=["1", "2"]), "layer_ids .* list of whole numbers"),
    ("speculators", lambda source: source.config.update(eagle_aux_hidden_state_layer_ids=3), "layer_ids .* 3 and must be a list"),
    ("speculators", lambda source: source.config.update(transformer_layer_config=[1]), r"transformer_layer_config .* \[1\] and must be an object"),
    ("speculators", lambda source: source.config.update(fc_norm="false"), "fc_norm .* 'false' and must be true or false"),
    ("hf", lambda source: source.config.update(logit_scale="x"), "logit_scale .* 'x' and must be a finite number above 0"),
    ("hf", lambda source: source.config.update(logit_scale=float("nan")), "logit_scale .* nan and must be a finite number above 0"),
    ("hf", lambda source: source.config.update(logit_scale=10**400), "logit_scale .* must be a finite number above 0"),
    ("hf", lambda source: source.config.update(logit_scale=True), "logit_scale .* True and must be a finite number above 0"),
    ("speculators", lambda source: _layer(source).update(rms_norm_eps="tiny"), "rms_norm_eps .* 'tiny' and must be a finite number"),
    ("speculators", lambda source: _layer(source).update(rope_parameters="yarn"), "rope_parameters .* 'yarn' and must be an object"),
    ("speculators", lambda source: _layer(source).update(rope_parameters={"rope_theta": "x"}), "rope_theta .* 'x' and must be a finite"),
    ("hf", lambda source: (source.config.pop("rope_parameters"), source.config.update(rope_theta="x")), "rope_theta .* 'x'"),
    ("speculators", lambda source: _layer(source).update(layer_types=3), "layer_types .* 3 and must be a list of words"),
    ("speculators", lambda source: _layer(source).update(num_attention_heads="4"), "num_attention_heads .* '4' and must be a whole number"),
    ("speculators", lambda source: _layer(source).update(hidden_act="gelu"), "hidden_act of .* is gelu, .* silu; name a draft of that"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "change", "named"), ODD)
def test_an_odd_value_of_the_config_is_one_sentence(
    layout: str, change: Callable[[Source], Any], named: str, make_source: Callable[..., Source]
) -> None:
    source = make_source(layout)
    change(source)
    with pytest.raises(DraftsmithError, match=rf"^train\.initial_draft: [^\n]*{named}[^\n]*$"):
        source.taken()


@pytest.mark.parametrize(
    ("name", "tensor", "named"),
    [
        ("d2t", torch.tensor(3), r"d2t of .* is of shape \[\] and must have 1 dim"),
        ("d2t", torch.zeros(12, 2, dtype=torch.int64), r"d2t of .* is of shape \[12, 2\] and must have 1 dim"),
        ("d2t", torch.full((12,), float("nan")), r"d2t of .* is torch\.float32 and must be whole numbers"),
        ("lm_head.weight", torch.tensor(3.0), r"lm_head\.weight of .* is of shape \[\] and must have 2 dim"),
        (
            "fc.weight",
            torch.ones(16, 48, dtype=torch.int8),
            r"fc\.weight of .* is torch\.int8 .* a draft that is not quantised$",
        ),
    ],
)
def test_an_odd_tensor_is_one_sentence(
    name: str, tensor: Tensor, named: str, make_source: Callable[..., Source]
) -> None:
    source = make_source()
    source.tensors[name] = tensor
    with pytest.raises(DraftsmithError, match=rf"^train\.initial_draft: [^\n]*{named}"):
        source.taken()


def test_a_scale_that_makes_the_head_overflow_is_named_before_the_first_step(
    make_source: Callable[..., Source],
) -> None:
    source = make_source("hf")
    source.config["logit_scale"] = 1e300
    with pytest.raises(DraftsmithError, match=r"lm_head\.weight of .* not finite"):
        source.taken()


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("rope", "told"),
    [
        (YARN, False),
        (YARN | {"factor": 8.0}, True),
        ({"type": "yarn", "rope_theta": 10000, "factor": 4, "original_max_position_embeddings": None}, False),
        ({"rope_type": "default", "rope_theta": 10000.0, "factor": 4.0}, True),
    ],
)
def test_another_rope_is_said_whatever_differs(
    rope: dict[str, Any], told: bool, make_source: Callable[..., Source], capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a length of its own, yarn takes the layer's positions (128), as transformers does."""
    source = make_source(rope=YARN)
    source.config["transformer_layer_config"]["rope_parameters"] = rope
    source.taken()
    assert ("has the rope" in "".join(capsys.readouterr())) == told
