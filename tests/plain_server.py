"""A server's run of a draft, written down once more and without the draft's code, for the tests to compare with."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


class PlainServer:
    """What vLLM's llama_eagle3.py does for one request, one token at a time with a key cache, in float64.

    Written from that file and from vLLM's rotary embedding, with none of the draft's code: weights by name, positions
    starting at 0 for the token that takes the state of token 0.
    """

    def __init__(self, weights: dict[str, Tensor], embedding: Tensor, shape: Any) -> None:
        self.weights = {name: tensor.detach().double() for name, tensor in weights.items()}
        self.embedding, self.shape = embedding.double(), shape
        self.cache: list[tuple[Tensor, Tensor]] = []

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean() + self.shape.rms_norm_eps) * self.weights[name + ".weight"]

    def frequency(self, pair: int) -> float:
        rope, width = self.shape.rope, self.shape.head_dim
        frequency = rope["rope_theta"] ** (-2 * pair / width)
        if rope["rope_type"] == "llama3":
            wavelength = 2 * math.pi / frequency
            turns = rope["original_max_position_embeddings"] / wavelength
            if turns < rope["low_freq_factor"]:
                return frequency / rope["factor"]
            if turns <= rope["high_freq_factor"]:
                smooth = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
                return (1 - smooth) * frequency / rope["factor"] + smooth * frequency
        return frequency

    def rotate(self, x: Tensor, position: int) -> Tensor:
        half = self.shape.head_dim // 2
        angles = torch.tensor([position * self.frequency(pair) for pair in range(half)], dtype=torch.float64)
        cos, sin = angles.cos(), angles.sin()
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def combine(self, aux: Tensor) -> Tensor:
        parts = list(aux.double())
        if self.shape.fc_norm:
            parts = [self.norm(part, f"fc_norm.{number}") for number, part in enumerate(parts)]
        return self.weights["fc.weight"] @ torch.cat(parts)

    def step(self, token: int, hidden: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Logits and the hidden state to go on with; the token's key and value are appended to the cache."""
        shape, w = self.shape, self.weights
        embedded = self.norm(self.embedding[token], "layers.0.input_layernorm")
        normed = self.norm(hidden, "layers.0.hidden_norm")
        residual = normed if shape.norm_before_residual else hidden
        x = torch.cat([embedded, normed])
        query = self.rotate((w["layers.0.self_attn.q_proj.weight"] @ x).view(shape.heads, -1), position)
        key = self.rotate((w["layers.0.self_attn.k_proj.weight"] @ x).view(shape.kv_heads, -1), position)
        self.cache.append((key, (w["layers.0.self_attn.v_proj.weight"] @ x).view(shape.kv_heads, -1)))
        near = self.cache if shape.attention_window is None else self.cache[-shape.attention_window :]
        heads = []
        for head in range(shape.heads):
            mine = head * shape.kv_heads // shape.heads
            keys = torch.stack([pair[0][mine] for pair in near])
            values = torch.stack([pair[1][mine] for pair in near])
            heads.append((keys @ query[head] / math.sqrt(shape.head_dim)).softmax(0) @ values)
        residual = residual + w["layers.0.self_attn.o_proj.weight"] @ torch.cat(heads)
        x = self.norm(residual, "layers.0.post_attention_layernorm")
        gate = w["layers.0.mlp.gate_proj.weight"] @ x
        x = w["layers.0.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * (w["layers.0.mlp.up_proj.weight"] @ x))
        before = residual + x
        after = self.norm(before, "norm")
        return w["lm_head.weight"] @ after, after if shape.norm_output else before


def of_export(folder: Path, embedding: Tensor) -> tuple[PlainServer, Tensor]:
    """The server of an exported draft, from its two files alone, and the target ids of its draft vocabulary."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    layer = config["transformer_layer_config"]
    shape = SimpleNamespace(
        heads=layer["num_attention_heads"],
        kv_heads=layer["num_key_value_heads"],
        head_dim=layer["head_dim"],
        rms_norm_eps=layer["rms_norm_eps"],
        rope=layer["rope_parameters"],
        norm_before_residual=config["norm_before_residual"],
        fc_norm=config["fc_norm"],
        norm_output=config["norm_output"],
        attention_window=layer["sliding_window"] if layer.get("layer_types") == ["sliding_attention"] else None,
    )
    d2t = tensors.pop("d2t")
    del tensors["t2d"]
    return PlainServer(tensors, embedding, shape), torch.arange(len(d2t)) + d2t
