"""Kimi-K2.5 without its weights: its config with all or some of its layers, and a folder that the workflow takes for a checkpoint."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import shapes

from draftsmith.config import Config, parse
from draftsmith.errors import DraftsmithError
from draftsmith.estimate import extraction
from draftsmith.estimate.target import Subject
from draftsmith.estimate.weights import weights
from draftsmith.few_layers import shortened
from draftsmith.get_target import language_parts, outline
from draftsmith.layers import resolve_layers

DEPTH = shapes.KIMI_TEXT["num_hidden_layers"]
FEW = 4
FORMS = ("whole", "text")
DATA = "config/demo/conversations.jsonl"
_DEMO = Path(__file__).resolve().parents[1] / DATA
STEP_TOKENS = 16384
KV_BYTES = 8 << 30
# Of a GPU's 0.9: what a step of 16,384 tokens needs for eight experts a token, and a context of CUDA and NCCL; assumed.
_STEP_BYTES = 8 << 30
# Widths for two CPU cores, whose vLLM has no INT4 experts. Latent sizes stay: its kernels know no others.
_QUICK = {
    "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8,
    "q_lora_rank": 256, "n_routed_experts": 16,
}  # fmt: skip


def config(count: int, form: str = "whole", quick: bool = False) -> dict[str, Any]:
    """config.json's content with the first ``count`` of the 61 layers.

    ``form`` 'text' is the language model alone, as DeepseekV3ForCausalLM: the class that the whole one has inside. ``quick``
    gives it small widths and no quantisation.
    """
    made = shortened(shapes.KIMI_K2_5, DEPTH, count)
    text = made["text_config"]
    if quick:
        text = {key: value for key, value in text.items() if key != "quantization_config"} | _QUICK
        made["text_config"], made["vision_config"] = (
            text,
            made["vision_config"] | {"text_hidden_size": text["hidden_size"]},
        )
    return made if form == "whole" else text | {"model_type": "deepseek_v3", "head_dim": text["qk_rope_head_dim"]}


def layer_ids(count: int) -> list[int]:
    """Layers to capture: [2, n//2, n-3] as by default, and those before the last where there are too few for that."""
    return resolve_layers(None, count) if count >= 7 else list(range(max(1, count - 3), count))


def subject(count: int, tp: int) -> Subject:
    """The target with ``count`` layers on ``tp`` GPUs, as the estimates take it."""
    whole = config(count)
    text = whole["text_config"]
    told = {
        "num_layers": count, "hidden_size": text["hidden_size"], "vocab_size": text["vocab_size"], "torch_dtype": text["dtype"],
    }  # fmt: skip
    settings = parse({"engine": {"tp": tp, "max_num_batched_tokens": STEP_TOKENS}}, "benchmark")
    return Subject(settings, "config.json", None, told, [text, whole], layer_ids(count), text["dtype"], "cuda")


def held(count: int, tp: int) -> int:
    """Bytes on each of ``tp`` GPUs for ``count`` layers: weights, states, KV cache, a step, and one layer as it is repacked.

    A layer's experts are there twice while they are brought into the order of their kernels.
    """
    figures = extraction.on_gpu(subject(count, tp), 4096, None)
    kept = sum(figure.bytes for figure in figures if figure.name in ("weights", "captured states"))
    layer = weights(subject(3, tp))[0] - weights(subject(2, tp))[0]
    return kept + layer // tp + KV_BYTES + _STEP_BYTES


def layers_that_fit(gpu_bytes: int, tp: int, engines: int = 1) -> int:
    """How many of the 61 layers fit on ``tp`` GPUs of ``gpu_bytes``, of which 0.9 may be taken, for as many ``engines`` at once."""
    room = 0.9 * gpu_bytes / engines
    return max((count for count in range(FEW, DEPTH + 1) if held(count, tp) <= room), default=0)


def write(folder: Path, count: int, form: str, quick: bool, checkpoint: bool = False) -> dict[str, Any]:
    """Make ``folder`` a target of ``count`` layers without weights; gives what target.json says of it.

    With ``checkpoint`` the workflow takes it for a complete one: a hollow weight file of the size that the estimate gives (a
    hole, which takes no room) tells preflight what would have to be loaded.
    """
    # A tokenizer as tests make it; Kimi's own is Python code that comes with its checkpoint.
    tests = str(Path(__file__).resolve().parents[1] / "tests")
    if tests not in sys.path:
        sys.path.append(tests)
    import tiny

    folder.mkdir(parents=True, exist_ok=True)
    values = config(count, form, quick)
    (folder / "config.json").write_text(json.dumps(values, indent=2))
    ends = {name: values[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(
        json.dumps(ends | {"do_sample": False, "max_length": 262144}, indent=2)
    )
    (folder / "preprocessor_config.json").write_text(json.dumps(tiny.PREPROCESSOR))
    tiny.tokenizer().save_pretrained(folder)
    told = outline(folder, source=str(folder), trust_remote_code=False)
    if checkpoint:
        parts = language_parts(folder, str(folder))
        described = Subject(Config(), str(folder), None, told, parts, layer_ids(count), told["torch_dtype"], "cuda")
        hollow(folder / "model.safetensors", weights(described)[0])
    return told | {"path": str(folder), "fingerprint": f"kimi-{form}-{count}", "layers": layer_ids(count)}


def hollow(path: Path, size: int) -> None:
    """A safetensors file whose one tensor has ``size`` bytes that are a hole: no engine can load it but with dummy weights."""
    entry = {"not.a.weight": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    head = json.dumps(entry).encode()
    head += b" " * (-len(head) % 8)
    try:
        with open(path, "wb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            file.truncate(8 + len(head) + size)
    except OSError as error:
        raise DraftsmithError(
            f"{path}: this file system takes no hollow file of {size / 1e9:.0f} GB ({error.strerror}); name a folder on another one"
        ) from error


def conversations(file: Path, count: int) -> None:
    """Write ``count`` conversations of one question and one answer, 3,000 to 4,000 of the folder's tokens each, no two alike."""
    texts = [json.loads(line)["messages"] for line in _DEMO.read_text().splitlines()]
    with open(file, "w") as out:
        for number in range(count):
            words, length = f"{number}: ", 1500 + number * 7 % 450
            for turn in (turn for place in range(len(texts)) for turn in texts[(number + place) % len(texts)]):
                words += turn["content"].encode("ascii", "ignore").decode() + " "
                if len(words) >= 2 * length:
                    break
            turns = [
                {"role": "user", "content": words[:length]},
                {"role": "assistant", "content": words[length : 2 * length].strip()},
            ]
            out.write(json.dumps({"id": f"long-{number}", "domain": f"d{number % 4}", "messages": turns}) + "\n")


def overlay(folder: Path, count: int, tp: int, data: str) -> str:
    """A second --configfile behind config/kimi-k2.5.yaml: the folder in place of the checkpoint, and the conversations in ``data``."""
    import yaml

    values = {
        "name": "kimi-k2.5-hollow",
        "target": {"source": str(folder.resolve()), "layers": layer_ids(count), "trust_remote_code": False},
        "engine": {"tp": tp},
        "data": {"sources": [{"path": data}]},
        # A target without weights has no answers to give.
        "regenerate": {"enabled": False},
        "preflight": {"dry_run": True},
    }
    return "# Beside config/kimi-k2.5.yaml; made by benchmarks/kimi_tp8.py.\n" + yaml.safe_dump(values, sort_keys=False)
