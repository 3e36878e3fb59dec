"""A checkpoint's fingerprints: what changes its states, what changes only how it is asked, and how little is read for it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from draftsmith import get_target, target_fingerprint
from draftsmith.target_fingerprint import states_fingerprint

CONFIG = {"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 8, "vocab_size": 16, "torch_dtype": "bfloat16"}
TENSORS = {
    "model.embed_tokens.weight": 400_000,
    **{
        f"model.layers.{layer}.{name}.weight": size
        for layer in range(3)
        for name, size in (("input_layernorm", 100), ("mlp.up_proj", 300_000), ("self_attn.q_proj", 100_000))
    },
    "lm_head.weight": 400_000,
}


def save(path: Path, tensors: dict[str, int], changed: tuple[str, int] | None = None) -> None:
    """A safetensors file of zeros; ``changed`` is a tensor's name and the byte of it that is 1."""
    entries, at = {}, 0
    for name, size in tensors.items():
        entries[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    head = json.dumps(entries).encode()
    data = bytearray(at)
    if changed is not None:
        data[entries[changed[0]]["data_offsets"][0] + changed[1]] = 1
    path.write_bytes(len(head).to_bytes(8, "little") + head + data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer.json").write_text("{}")
    save(tmp_path / "model.safetensors", TENSORS)
    return tmp_path


def both(folder: Path, revision: str | None = None, code: bool = False) -> tuple[str, str]:
    """(fingerprint, states_fingerprint) of target.json."""
    told = get_target.describe(folder, source=str(folder), revision=revision, trust_remote_code=code)
    return told["fingerprint"], told["states_fingerprint"]


@pytest.mark.parametrize(
    ("name", "at"),
    [(name, TENSORS[name] // 2) for name in TENSORS] + [("model.layers.1.input_layernorm.weight", 99)],
    ids=lambda value: str(value),
)
def test_a_change_in_one_tensor_is_seen(folder: Path, name: str, at: int) -> None:
    """As a merged LoRA makes it: attention in the middle of a file, its beginning, middle and end as they were."""
    before = both(folder)
    save(folder / "model.safetensors", TENSORS, (name, at))
    after = both(folder)
    assert before[0] != after[0]
    assert before[1] != after[1]
    save(folder / "model.safetensors", TENSORS)
    assert both(folder) == before


def test_a_part_of_a_large_tensor_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """17 pieces of 4096 bytes at equal distances of (400,000 - 4,096) / 16, such as the last, in which are the rows of new tokens."""
    monkeypatch.setattr(target_fingerprint, "_LARGE", 400_000)
    before = both(folder)
    for place, seen in ((0, True), (4096, False), (3 * 24744, True), (3 * 24744 - 1, False), (399_999, True)):
        save(folder / "model.safetensors", TENSORS, ("model.embed_tokens.weight", place))
        assert (both(folder)[1] != before[1]) is seen, place


def test_only_samples_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 KiB of each of 8 tensors, the whole of 3 norms, and the last 64 KiB of the file, though it has two megabytes."""
    spans: list[tuple[int, int]] = []
    read = target_fingerprint._read

    def counted(path: Path, wanted: list[tuple[int, int]]) -> bytes:
        spans.extend(wanted)
        return read(path, wanted)

    monkeypatch.setattr(target_fingerprint, "_read", counted)
    both(folder)
    assert sum(end - start for start, end in spans) == 8 * 4096 + 3 * 100 + (64 << 10)
    size = (folder / "model.safetensors").stat().st_size
    data = size - sum(TENSORS.values())
    assert spans[0] == (data + 200_000 - 2048, data + 200_000 + 2048)
    assert spans[-1] == (size - (64 << 10), size)


def test_the_order_of_files_and_tasks_is_fixed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever thread is the first: two files of more tensors than one task has, read by one thread and by many."""
    for name in ("a", "b"):
        save(folder / f"{name}.safetensors", {f"{name}{number}": 5000 for number in range(40)})
    monkeypatch.setattr(target_fingerprint, "_TASK", 3)
    many = both(folder)
    monkeypatch.setattr(target_fingerprint, "_THREADS", 1)
    assert both(folder) == many


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "tokenization_x.py"]
)
def test_what_makes_tokens_changes_no_state(folder: Path, name: str) -> None:
    before = both(folder, code=True)
    (folder / name).write_text('{"new": 1}')
    after = both(folder, code=True)
    assert before[0] != after[0]
    assert before[1] == after[1]


def test_a_revision_of_the_same_files_changes_no_state(folder: Path) -> None:
    one, other = both(folder, revision="abc"), both(folder, revision="def")
    assert one[0] != other[0]
    assert one[1] == other[1]


@pytest.mark.parametrize("name", ["modeling_x.py", "layers/attention.py"])
def test_the_checkpoints_code_counts_where_it_runs(folder: Path, name: str) -> None:
    """It may be written anew while config and weights stay."""
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("scale = 1")
    here, there = both(folder, code=True), both(folder)
    (folder / name).write_text("scale = 2")
    assert both(folder) == there
    after = both(folder, code=True)
    assert here[0] != after[0]
    assert here[1] != after[1]


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json", "quantize_config.json"])
def test_configs_that_the_engine_reads_change_states(folder: Path, name: str) -> None:
    before = both(folder)
    content = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    (folder / name).write_text(json.dumps(content | {"new": 1}))
    after = both(folder)
    assert before[0] != after[0]
    assert before[1] != after[1]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model-q4.gguf"])
@pytest.mark.parametrize("at", [0, 2_000_001, 3_999_999])
def test_weights_of_other_formats_are_sampled_all_over(folder: Path, name: str, at: int) -> None:
    """1024 pieces of 4 KiB hold a file of 4 MB as a whole; there is no list of its tensors."""
    (folder / name).write_bytes(bytes(4_000_000))
    before = both(folder)
    with open(folder / name, "r+b") as file:
        os.pwrite(file.fileno(), b"1", at)
    assert both(folder)[1] != before[1]


def test_what_an_older_version_described() -> None:
    assert states_fingerprint({"fingerprint": "f"}) == "f"
    assert states_fingerprint({"fingerprint": "f", "states_fingerprint": "s"}) == "s"
