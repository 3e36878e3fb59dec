"""Configs of targets without weights, and the demo's real figures."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

from draftsmith.config import Config, parse
from draftsmith.estimate.target import Subject, subject

# As moonshotai/Kimi-K2.5 has it. Run and not imported: the benchmarks' folder has a tokenize.py.
KIMI: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks/shapes.py"))["KIMI_K2_5"]

SMOLLM: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    "dtype": "bfloat16", "rms_norm_eps": 1e-5,
}  # fmt: skip

DEMO: dict[str, Any] = json.loads((Path(__file__).parent / "demo.json").read_text())


def config(**sections: Any) -> Config:
    """A config of the named sections, the rest default."""
    return parse(sections, "test")


def folder(place: Path, settings: dict[str, Any]) -> Path:
    """A folder with nothing but config.json."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(settings))
    return place


def given(place: Path, settings: dict[str, Any], device: str = "cuda", **sections: Any) -> Subject:
    """The target of a config-only folder in ``place``."""
    return subject(config(**sections), place / "no-results", folder(place, settings), device)[0]
