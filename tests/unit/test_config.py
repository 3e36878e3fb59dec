"""Every fault of a config is one sentence that names the file and the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftsmith import config
from draftsmith.config import Config
from draftsmith.errors import DraftsmithError

FAULTS: list[tuple[str, dict[str, Any], str]] = [
    ("unknown section", {"trian": {}}, "my.yaml: trian is no known key; config/README.md lists them all"),
    (
        "unknown key",
        {"train": {"learnin_rate": 1e-3}},
        "my.yaml: train.learnin_rate is no known key; config/README.md lists them all",
    ),
    (
        "renamed key",
        {"regenerate": {"keep_truncated": False}},
        "my.yaml: regenerate.keep_truncated is no known key; it is now regenerate.unfinished: keep or drop",
    ),
    (
        "unknown key of a list entry",
        {"data": {"sources": [{"path": "a"}, {"path": "b", "domian": "chat"}]}},
        "my.yaml: data.sources.1.domian is no known key; config/README.md lists them all",
    ),
    (
        "a store without a name",
        {"extract": {"store": ""}},
        "my.yaml: extract.store: name a folder, such as 'store'",
    ),
    (
        "a store of blanks",
        {"extract": {"store": "  "}},
        "my.yaml: extract.store: name a folder, such as 'store'",
    ),
    (
        "below its range",
        {"train": {"learning_rate": 0}},
        "my.yaml: train.learning_rate: Input should be greater than 0 (given: 0)",
    ),
    (
        "above its range",
        {"data": {"max_dropped_fraction": 1.5}},
        "my.yaml: data.max_dropped_fraction: Input should be less than or equal to 1 (given: 1.5)",
    ),
    (
        "no number",
        {"engine": {"tp": "eight"}},
        "my.yaml: engine.tp: Input should be a valid integer, unable to parse string as an integer (given: 'eight')",
    ),
    (
        "half a GPU",
        {"engine": {"tp": 0.5}},
        "my.yaml: engine.tp: Input should be a valid integer, got a number with a fractional part (given: 0.5)",
    ),
    (
        "infinite",
        {"train": {"max_grad_norm": float("inf")}},
        "my.yaml: train.max_grad_norm: Input should be a finite number (given: inf)",
    ),
    (
        "none of the choices",
        {"target": {"dtype": "int4"}},
        "my.yaml: target.dtype: Input should be 'auto', 'bfloat16', 'float16' or 'float32' (given: 'int4')",
    ),
    (
        "no source",
        {"data": {"sources": []}},
        "my.yaml: data.sources: List should have at least 1 item after validation, not 0",
    ),
    ("a source without its path", {"data": {"sources": [{}]}}, "my.yaml: data.sources.0.path: Field required"),
    (
        "a name that is a path",
        {"name": "../demo"},
        "my.yaml: name: String should match pattern '^[A-Za-z0-9][A-Za-z0-9._-]*$' (given: '../demo')",
    ),
    (
        "layers unsorted",
        {"target": {"layers": [2, 27, 15]}},
        "my.yaml: target.layers: layer ids must be ascending: [2, 27, 15]; write [2, 15, 27]",
    ),
    (
        "layers repeated",
        {"target": {"layers": [2, 15, 15]}},
        "my.yaml: target.layers: layer ids must be distinct: [2, 15, 15]",
    ),
    (
        "layers negative",
        {"target": {"layers": [-1, 2]}},
        "my.yaml: target.layers: layer ids cannot be negative: [-1, 2]",
    ),
    (
        "no layers",
        {"target": {"layers": []}},
        "my.yaml: target.layers: at least one layer id is needed; leave the key out for the default",
    ),
    (
        "an optimiser that cannot be",
        {"train": {"betas": [0.9, 1.5]}},
        "my.yaml: train.betas: each must be at least 0 and below 1: [0.9, 1.5]",
    ),
    (
        "rows longer than a packed sequence",
        {"tokenize": {"max_length": 4096}, "train": {"pack_tokens": 2048}},
        "my.yaml: train.pack_tokens (2048) must hold the longest row, tokenize.max_length (4096)",
    ),
    (
        "more requests in flight than the engine takes",
        {"engine": {"max_num_seqs": 16}, "evaluate": {"concurrency": [1, 32]}},
        "my.yaml: evaluate.concurrency asks for 32 requests in flight, and the engine works on 16 at once; raise engine.max_num_seqs",
    ),
    (
        "an acceptance length that no draft of so many tokens has",
        {"evaluate": {"k": 3, "min_acceptance_length": 4.5}},
        "my.yaml: evaluate.min_acceptance_length (4.5) is more than a draft of 3 tokens can reach, which is 4; lower it, or raise evaluate.k",
    ),
    (
        "a window of no position",
        {"train": {"attention_window": 0}},
        "my.yaml: train.attention_window: Input should be greater than 0 (given: 0)",
    ),
    (
        "a window that SGLang does not have",
        {"train": {"attention_window": 512, "norm_before_residual": False}, "export": {"layouts": ["hf", "sglang"]}},
        "my.yaml: export.layouts: SGLang's draft always sees the whole context, so train.attention_window (512) cannot be "
        "served by it; leave sglang out or the window unset",
    ),
    (
        "a switch that SGLang does not know, which is the default",
        {"export": {"layouts": ["sglang"]}},
        "my.yaml: export.layouts: SGLang runs every draft as if norm_before_residual were false; set "
        "train.norm_before_residual: false, or leave sglang out",
    ),
    (
        "layers that SGLang cannot hand out",
        {"train": {"norm_before_residual": False}, "export": {"layouts": ["sglang"]}, "target": {"layers": [0, 2, 4]}},
        "my.yaml: export.layouts: SGLang takes the outputs of layers, and target.layers ([0, 2, 4]) names inputs, of which "
        "that of layer 0 is no layer's output; choose ids above 0, or leave sglang out",
    ),
    (
        "a switch for a number",
        {"train": {"attention_window": True}},
        "my.yaml: train.attention_window: true and false are no value of this key; config/README.md tells what it takes",
    ),
    (
        "a switch in a list of numbers",
        {"evaluate": {"ks": [1, True]}},
        "my.yaml: evaluate.ks: true and false are no value of this key; config/README.md tells what it takes",
    ),
    (
        "a temperature that vLLM raises",
        {"evaluate": {"temperatures": [0, 0.001]}},
        "my.yaml: evaluate.temperatures.1: vLLM samples at 0.01 where 0.001 is asked for; write 0 or at least 0.01",
    ),
]


@pytest.mark.parametrize(("values", "sentence"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
def test_a_fault_is_one_sentence(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DraftsmithError) as error:
        config.check_consistent(config.parse(values, "my.yaml"), "my.yaml")
    assert str(error.value).splitlines() == [sentence]


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(DraftsmithError) as error:
        config.parse({"name": "a", "epochs": 3, "train": {"epochs": 0}}, "my.yaml")
    assert sorted(str(error.value).splitlines()) == [
        "my.yaml: epochs is no known key; config/README.md lists them all",
        "my.yaml: train.epochs: Input should be greater than 0 (given: 0)",
    ]


def test_a_section_that_is_no_mapping() -> None:
    with pytest.raises(DraftsmithError, match=r"^my\.yaml: train: .*\(given: 3\)$"):
        config.parse({"train": 3}, "my.yaml")


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "my.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refusal(path: Path) -> str:
    """The one sentence that loading ``path`` ends in, with its folder left out."""
    with pytest.raises(DraftsmithError) as error:
        config.load(path)
    (sentence,) = str(error.value).splitlines()
    return sentence.replace(f"{path.parent}/", "")


def test_a_file_that_is_no_mapping(tmp_path: Path) -> None:
    assert refusal(write(tmp_path, "- name: demo\n")) == "my.yaml: a mapping of keys is needed, not list"


def test_broken_yaml_names_the_line(tmp_path: Path) -> None:
    sentence = refusal(write(tmp_path, "name: demo\ntrain:\n  epochs: [3\n"))
    assert sentence.startswith("my.yaml: not valid YAML: ")
    assert "line 4" in sentence


def test_a_tab_is_broken_yaml(tmp_path: Path) -> None:
    assert refusal(write(tmp_path, "train:\n\tepochs: 3\n")).startswith("my.yaml: not valid YAML: ")


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    assert refusal(write(tmp_path, b"name: \xff\xfe\n")).startswith("my.yaml: ")


def test_a_missing_file(tmp_path: Path) -> None:
    assert refusal(tmp_path / "my.yaml") == "my.yaml: no such config file"


def test_a_folder_instead_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").mkdir()
    assert refusal(tmp_path / "my.yaml") == "my.yaml: cannot be read (Is a directory)"


def test_broken_settings_on_the_command_line() -> None:
    with pytest.raises(DraftsmithError, match=r"^--settings: not valid JSON: .* line 1 column 11"):
        config.settings('{"train": }')


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    assert config.load(write(tmp_path, "# nothing yet\n")) == Config()


def test_settings_of_a_stage_are_sections_and_the_rest_is_default() -> None:
    parsed = config.settings('{"name": "a", "train": {"epochs": 2, "betas": [0.8, 0.9]}}')
    assert (parsed.name, parsed.train.epochs, parsed.train.betas) == ("a", 2, (0.8, 0.9))
    assert parsed.tokenize == Config().tokenize


def test_a_dumped_config_is_read_back_the_same() -> None:
    given = Config.model_validate(
        {"target": {"layers": [1, 2, 3]}, "train": {"max_steps": 5}, "vocabulary": {"size": None}}
    )
    assert config.settings(given.model_dump_json()) == given


@pytest.mark.parametrize("name", ["config.yaml", "kimi-k2.5.yaml", "demo/regenerate.yaml"])
def test_the_config_files_are_valid(repo: Path, name: str) -> None:
    config.load(repo / "config" / name)


def test_kimi_is_what_its_comments_say(repo: Path) -> None:
    """Four states of width 7168 at two bytes; layers as for the 61 layers of the model."""
    from draftsmith.store import bytes_per_token

    kimi = config.load(repo / "config/kimi-k2.5.yaml")
    assert kimi.target.layers == [2, 61 // 2, 61 - 3]
    assert kimi.engine.tp == 8
    assert bytes_per_token(len(kimi.target.layers), 7168, kimi.target.dtype) == 57344
    assert "57,344 bytes" in (repo / "config/kimi-k2.5.yaml").read_text()


def test_an_acceptance_length_that_every_draft_token_has_to_be_right_for_may_be_asked() -> None:
    config.check_consistent(config.parse({"evaluate": {"k": 3, "min_acceptance_length": 4}}, "my.yaml"), "my.yaml")


def test_the_store_may_lie_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a shell has it, for every stage that reads the key; a folder called ~ would be made otherwise."""
    monkeypatch.setenv("HOME", "/home/me")
    for given, meant in (("~/x", "/home/me/x"), ("/data/~x", "/data/~x"), ("store", "store"), ("a/../b", "a/../b")):
        assert config.parse({"extract": {"store": given}}, "test").extract.store == meant
