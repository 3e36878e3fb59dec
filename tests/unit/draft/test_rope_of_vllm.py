"""The angles that vLLM computes from an exported rope are those that the draft was trained with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftsmith.draft.config import DraftShape
from ropes import LLAMA3

ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 1e4},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 256},
    LLAMA3,
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_vllm_turns_as_training_did(rope: dict[str, Any]) -> None:
    pytest.importorskip("vllm")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    shape = DraftShape(
        hidden_size=64, heads=2, kv_heads=1, head_dim=32, intermediate_size=64, rms_norm_eps=1e-6, rope=rope, max_positions=1024,
        target_vocab=40, draft_vocab=12, layers=(1, 2, 3), norm_before_residual=True, fc_norm=False, norm_output=False,
    )  # fmt: skip
    with set_current_vllm_config(VllmConfig()):
        served = get_rope(32, max_position=1024, rope_parameters=dict(rope), dtype=torch.float32)
    cos, sin = LlamaRotaryEmbedding(shape.llama())(torch.zeros(1), torch.arange(1024)[None])
    # vLLM keeps one half of each, as the other repeats it.
    torch.testing.assert_close(
        served.cos_sin_cache[:1024], torch.cat([cos[0, :, :16], sin[0, :, :16]], -1), atol=1e-6, rtol=0
    )
