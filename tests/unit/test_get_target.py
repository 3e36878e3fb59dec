"""get_target: sizes, fingerprint, packages and sentences for what cannot be used."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftsmith import get_target
from draftsmith.config import Config, parse
from draftsmith.errors import DraftsmithError

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 30, "hidden_size": 576,
    "vocab_size": 49152, "torch_dtype": "bfloat16", "max_position_embeddings": 8192,
}  # fmt: skip


def weights_file(size: int, last: bytes = b"\0") -> bytes:
    """A safetensors file of one tensor of ``size`` bytes, whose last byte is ``last``."""
    head = json.dumps({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return len(head).to_bytes(8, "little") + head + bytes(size - 1) + last


def checkpoint(folder: Path, settings: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights_file(200_000))
    return folder


def config(source: str, **target: Any) -> Config:
    return parse({"target": {"source": source, **target}}, "test")


def get(tmp_path: Path, source: str, **target: Any) -> dict[str, Any]:
    out = tmp_path / "target.json"
    get_target.run(config(source, **target), cache=tmp_path / "cache", target=out)
    return dict(json.loads(out.read_text()))


def test_folder_is_used_in_place(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", LLAMA)
    found = get(tmp_path, str(folder), trust_remote_code=True)
    assert {key: found[key] for key in ("path", "num_layers", "hidden_size", "vocab_size", "torch_dtype")} == {
        "path": str(folder), "num_layers": 30, "hidden_size": 576, "vocab_size": 49152,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    assert found["trust_remote_code"] is True
    assert found["max_positions"] == 8192
    assert found["multimodal"] is False
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"target": {"layers": [2, 15, 99]}}, r"target\.layers: \[99\] lie outside .* with n = 30 ids go from 0 to 29"),
        ({"target": {"layers": [2, 15, 30]}}, r"target\.layers: 30 is the state behind the last of n = 30 layers"),
        ({"vocabulary": {"size": 49153}}, r"vocabulary\.size is 49153, the target has 49152 tokens; lower it"),
        ({"target": {"layers": [2, 15, 29]}, "vocabulary": {"size": 49152}}, None),
        # Its own vocabulary comes with it.
        ({"train": {"initial_draft": "a"}, "vocabulary": {"size": 49153}}, None),
    ],
)
def test_layers_and_vocabulary_that_the_target_does_not_have(
    tmp_path: Path, asked: dict[str, Any], said: str | None
) -> None:
    """By the command, as the rule calls it: the settings are the rule's own, the config of the run comes beside them."""
    folder, out = checkpoint(tmp_path / "m", LLAMA), tmp_path / "target.json"
    whole = asked | {"target": {"source": str(folder)} | asked.get("target", {})}
    command = [
        sys.executable, "-m", "draftsmith", "get-target", "--settings", json.dumps({"target": {"source": str(folder)}}),
        "--cache", str(tmp_path / "cache"), "--target", str(out),
    ]  # fmt: skip
    environment = os.environ | {"DRAFTSMITH_CONFIG": json.dumps(whole)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, out.exists()) == ((0, True) if said is None else (1, False)), done.stderr
    if said is not None:
        assert re.search(said, done.stderr)
        assert "Traceback" not in done.stderr


def test_sizes_of_a_multimodal_target_come_from_its_text_config(tmp_path: Path) -> None:
    text = {"num_hidden_layers": 61, "hidden_size": 7168, "vocab_size": 163840, "dtype": "bfloat16"}
    settings = {
        "model_type": "kimi_k25",
        "architectures": ["KimiK25ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {},
    }
    found = get(tmp_path, str(checkpoint(tmp_path / "m", settings)))
    assert (found["num_layers"], found["hidden_size"], found["vocab_size"]) == (61, 7168, 163840)
    assert found["multimodal"] is True


def test_what_a_text_config_leaves_out_is_its_class_s_default(tmp_path: Path) -> None:
    """As published Gemma 3 checkpoints have it; neither vocabulary nor positions are in their config.json."""
    text = {"model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560}
    settings = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text,
        "dtype": "bfloat16",
    }
    found = get(tmp_path, str(checkpoint(tmp_path / "m", settings)))
    assert {key: found[key] for key in ("num_layers", "hidden_size", "vocab_size", "max_positions", "torch_dtype")} == {
        "num_layers": 34, "hidden_size": 2560, "vocab_size": 262208, "max_positions": 131072, "torch_dtype": "bfloat16",
    }  # fmt: skip


def test_a_language_model_may_lie_two_configs_deep(tmp_path: Path) -> None:
    text = {
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "vocab_size": 151936,
        "max_position_embeddings": 65536,
        "dtype": "bfloat16",
    }
    talker = {"text_config": {"num_hidden_layers": 20, "hidden_size": 1024, "vocab_size": 3072}}
    settings = {
        "model_type": "omni",
        "talker_config": talker,
        "thinker_config": {"audio_config": {}, "text_config": text},
    }
    found = get(tmp_path, str(checkpoint(tmp_path / "m", settings)))
    assert (found["num_layers"], found["hidden_size"], found["vocab_size"]) == (48, 2048, 151936)
    assert (found["max_positions"], found["torch_dtype"], found["multimodal"]) == (65536, "bfloat16", True)


@pytest.mark.parametrize(
    ("more", "multimodal"),
    [
        ({}, False),
        ({"vision_config": {}}, True),
        ({"vit_config": {"depth": 2}}, True),
        ({"visual": {}}, True),
        ({"vision_start_token_id": 7}, False),
    ],
)
def test_a_tower_makes_a_target_multimodal(tmp_path: Path, more: dict[str, Any], multimodal: bool) -> None:
    assert get(tmp_path, str(checkpoint(tmp_path / "m", LLAMA | more)))["multimodal"] is multimodal


def test_sizes_that_nobody_knows(tmp_path: Path) -> None:
    settings = {"model_type": "never_heard_of", "num_hidden_layers": 4, "vocab_size": 100}
    with pytest.raises(
        DraftsmithError,
        match=r"config\.json: names no hidden_size, at the top or in text_config, and transformers knows",
    ):
        get(tmp_path, str(checkpoint(tmp_path / "m", settings)))
    # Where positions come from nothing that is learnt or turned, there is no end to them.
    found = get(tmp_path, str(checkpoint(tmp_path / "n", settings | {"hidden_size": 8})))
    assert found["max_positions"] is None


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, None),
        ({"rope_scaling": None}, None),
        ({"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 4096}, 4096),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 4096}}, 4096),
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 4096}}, None),
        ({"text_config": {"rope_scaling": {"rope_type": "longrope"}, "original_max_position_embeddings": 512}}, 512),
    ],
)
def test_where_longrope_begins_to_be_long(tmp_path: Path, more: dict[str, Any], expected: int | None) -> None:
    assert get(tmp_path, str(checkpoint(tmp_path / "m", LLAMA | more)))["longrope_after"] == expected


def test_a_folder_needs_no_torch(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", LLAMA)
    code = (
        "import sys; from pathlib import Path; from draftsmith import get_target; from draftsmith.config import parse\n"
        f"get_target.run(parse({{'target': {{'source': {str(folder)!r}}}}}, 'test'), cache=Path('c'), target=Path('t.json'))\n"
        "print([name for name in ('torch', 'transformers', 'huggingface_hub') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "change", ["config.json", "tokenizer.json", "chat_template.jinja", "size", "weights", "revision"]
)
def test_fingerprint_follows_what_matters(tmp_path: Path, change: str) -> None:
    folder = checkpoint(tmp_path / "m", LLAMA)
    before = get(tmp_path, str(folder))["fingerprint"]
    assert get(tmp_path, str(folder))["fingerprint"] == before
    (folder / "README.md").write_text("no part of it")
    assert get(tmp_path, str(folder))["fingerprint"] == before
    revision = None
    weights = folder / "model.safetensors"
    if change == "size":
        weights.write_bytes(weights_file(200_001))
    elif change == "weights":
        # Saved again after training: the same name and size.
        weights.write_bytes(weights_file(200_000, b"1"))
    elif change == "revision":
        revision = "abc"
    else:
        content = json.loads((folder / change).read_text()) if (folder / change).exists() else {}
        (folder / change).write_text(json.dumps(content | {"new": 1}))
    assert get(tmp_path, str(folder), revision=revision)["fingerprint"] != before


def test_a_copied_folder_has_the_same_fingerprint(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", LLAMA)
    copy = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    assert get(tmp_path, str(folder))["fingerprint"] == get(tmp_path, str(copy))["fingerprint"]


def test_sentences_for_folders_that_are_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(DraftsmithError, match=r"/nowhere: no such folder; target\.source"):
        get(tmp_path, "/nowhere")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DraftsmithError, match=r"holds no config\.json; target\.source"):
        get(tmp_path, str(empty))
    (empty / "config.json").write_text("{")
    with pytest.raises(DraftsmithError, match=r"config\.json: not valid JSON"):
        get(tmp_path, str(empty))
    (empty / "config.json").write_text(json.dumps(LLAMA))
    (empty / "pytorch_model.bin").write_text("")
    with pytest.raises(DraftsmithError, match=r"holds no \.safetensors files"):
        get(tmp_path, str(empty))
    (empty / "model.safetensors").write_bytes(weights_file(10))
    with pytest.raises(DraftsmithError, match="holds no tokenizer files"):
        get(tmp_path, str(empty))


def test_a_download_that_is_not_complete_names_the_first_missing_file(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", LLAMA)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DraftsmithError, match=r"1 of 2 weight files .* model-00002\.safetensors"):
        get(tmp_path, str(folder))


def test_hub_snapshot_is_pinned_to_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked = {}

    def snapshot_download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(snapshot)

    snapshot = checkpoint(tmp_path / "0123abc", LLAMA)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    for variable in ("HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    found = get(tmp_path, "org/model", revision="main")
    assert found["revision"] == "0123abc"
    assert (asked["name"], asked["revision"], asked["cache_dir"]) == ("org/model", "main", tmp_path / "cache" / "hub")
    assert "*.bin" not in asked["allow_patterns"]
    monkeypatch.setenv("HF_HOME", str(tmp_path / "mine"))
    get(tmp_path, "org/model")
    assert asked["cache_dir"] is None, "the cache that the user has named"


def test_a_hub_that_is_out_of_reach_gives_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def snapshot_download(*args: Any, **options: Any) -> str:
        raise ConnectionError

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(
        DraftsmithError,
        match=r"target\.source org/model: no such folder, and the hub .* ConnectionError: no further text",
    ):
        get(tmp_path, "org/model")


def test_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DraftsmithError, match="no Python package not_there is installed"):
        get(tmp_path, "package:not_there")
    package = tmp_path / "site" / "some_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    with pytest.raises(DraftsmithError, match=r"exactly one \.gguf file; found none"):
        get(tmp_path, "package:some_model")
    (package / "some.gguf").write_bytes(b"weights")
    converted = []

    def convert(file: Path, folder: Path) -> None:
        converted.append(file.name)
        folder.parent.mkdir(exist_ok=True)
        checkpoint(folder, LLAMA)

    monkeypatch.setattr(get_target, "_convert", convert)
    first = get(tmp_path, "package:some_model")
    assert get(tmp_path, "package:some_model") == first
    assert converted == ["some.gguf"]
    # No distribution has a version for it, so the file's own hash is in the folder's name.
    assert Path(first["path"]).parent == tmp_path / "cache"
    assert Path(first["path"]).name.startswith("some_model-")


def test_weights_that_were_cut_off_are_found_before_a_load(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", LLAMA)
    file = folder / "model.safetensors"
    whole = file.stat().st_size
    with open(file, "r+b") as opened:
        opened.truncate(100_000)
    with pytest.raises(
        DraftsmithError, match=rf"model\.safetensors: is 100000 bytes long and should be {whole}; complete the download"
    ):
        get(tmp_path, str(folder))
    file.write_bytes(b"PK\x03\x04 a pickle")
    with pytest.raises(DraftsmithError, match=r"model\.safetensors: not a safetensors file"):
        get(tmp_path, str(folder))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"num_hidden_layers": 0}, "its num_hidden_layers is 0 and should be a number above 0"),
        ({"num_hidden_layers": -3}, "its num_hidden_layers is -3 and should be a number above 0"),
        ({"num_hidden_layers": True}, "its num_hidden_layers is true and should be a number above 0"),
        ({"text_config": {"vocab_size": False}}, "its vocab_size is false and should be a number above 0"),
        ({"rope_parameters": "x"}, "its rope_parameters is 'x' and should be an object"),
        ({"rope_scaling": ["su"]}, r"its rope_scaling is \['su'\] and should be an object"),
    ],
)
def test_sizes_that_cannot_be(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    with pytest.raises(DraftsmithError, match=rf"m/config\.json: {said}; correct it"):
        get(tmp_path, str(checkpoint(tmp_path / "m", LLAMA | more)))


def test_positions_without_an_end(tmp_path: Path) -> None:
    """Some configs write -1 where there is none."""
    folder = checkpoint(tmp_path / "m", LLAMA | {"max_position_embeddings": -1, "model_type": "never_heard_of"})
    assert get(tmp_path, str(folder))["max_positions"] is None


def test_a_folder_with_the_name_of_weights(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", LLAMA)
    (folder / "x.safetensors").mkdir()
    with pytest.raises(
        DraftsmithError, match=r"x\.safetensors: is a folder with the name of weights; give it another name"
    ):
        get(tmp_path, str(folder))


def test_a_broken_index(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", LLAMA)
    for content in ('{"weight_map"', "{}"):
        (folder / "model.safetensors.index.json").write_text(content)
        with pytest.raises(DraftsmithError, match=r"model\.safetensors\.index\.json: .*; fetch it again"):
            get(tmp_path, str(folder))
