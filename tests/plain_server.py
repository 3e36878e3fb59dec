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

LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class PlainServer:
    """What vLLM's llama_eagle3.py and deepseek_eagle3.py do for one request, one token at a time with a key cache, in float64.

    Written from those files and from vLLM's rotary embeddings, with none of the draft's code: weights by name, positions
    starting at 0 for the token that takes the state of token 0.
    """

    def __init__(self, weights: dict[str, Tensor], embedding: Tensor, shape: Any) -> None:
        self.weights = {name: tensor.detach().double() for name, tensor in weights.items()}
        self.embedding, self.shape = embedding.double(), shape
        self.cache: list[tuple[Tensor, Tensor]] = []
        self.turned = getattr(shape, "qk_rope_head_dim", None) or shape.head_dim

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean() + self.shape.rms_norm_eps) * self.weights[name + ".weight"]

    def frequency(self, pair: int) -> float:
        rope, width = self.shape.rope, self.turned
        frequency = rope["rope_theta"] ** (-2 * pair / width)
        if rope["rope_type"] == "llama3":
            wavelength = 2 * math.pi / frequency
            turns = rope["original_max_position_embeddings"] / wavelength
            if turns < rope["low_freq_factor"]:
                return frequency / rope["factor"]
            if turns <= rope["high_freq_factor"]:
                smooth = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
                return (1 - smooth) * frequency / rope["factor"] + smooth * frequency
        if rope["rope_type"] == "yarn":

            def place(turns: float) -> float:
                length = rope["original_max_position_embeddings"]
                return width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

            low, high = (
                max(math.floor(place(rope["beta_fast"])), 0),
                min(math.ceil(place(rope["beta_slow"])), width - 1),
            )
            slow = min(max((pair - low) / max(high - low, 0.001), 0.0), 1.0)
            return slow * frequency / rope["factor"] + (1 - slow) * frequency
        return frequency

    def angles(self, position: int) -> tuple[Tensor, Tensor]:
        angles = [position * self.frequency(pair) for pair in range(self.turned // 2)]
        return torch.tensor(angles, dtype=torch.float64).cos(), torch.tensor(angles, dtype=torch.float64).sin()

    def rotate(self, x: Tensor, position: int) -> Tensor:
        (cos, sin), half = self.angles(position), self.turned // 2
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def rotate_neighbours(self, x: Tensor, position: int) -> Tensor:
        cos, sin = self.angles(position)
        first, second = x[..., 0::2], x[..., 1::2]
        return torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)

    def grouped(self, x: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor, float]:
        """Query [heads, d], key and value [kv heads, d], and what scores are multiplied with."""
        shape, w = self.shape, self.weights
        query = self.rotate((w["layers.0.self_attn.q_proj.weight"] @ x).view(shape.heads, -1), position)
        key = self.rotate((w["layers.0.self_attn.k_proj.weight"] @ x).view(shape.kv_heads, -1), position)
        value = (w["layers.0.self_attn.v_proj.weight"] @ x).view(shape.kv_heads, -1)
        return query, key, value, shape.head_dim**-0.5

    def latent(self, x: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor, float]:
        """The same of latent attention, with a key and a value for each head."""
        shape, w, at = self.shape, self.weights, "layers.0.self_attn."
        asked = w[at + "q_b_proj.weight"] @ self.norm(w[at + "q_a_proj.weight"] @ x, at + "q_a_layernorm")
        plain, turned = asked.view(shape.heads, -1).split([shape.qk_nope_head_dim, shape.qk_rope_head_dim], -1)
        query = torch.cat([plain, self.rotate_neighbours(turned, position)], -1)
        low, turned = (w[at + "kv_a_proj_with_mqa.weight"] @ x).split([shape.kv_lora_rank, shape.qk_rope_head_dim])
        high = (w[at + "kv_b_proj.weight"] @ self.norm(low, at + "kv_a_layernorm")).view(shape.heads, -1)
        plain, value = high.split([shape.qk_nope_head_dim, shape.v_head_dim], -1)
        key = torch.cat([plain, self.rotate_neighbours(turned, position).expand(shape.heads, -1)], -1)
        scale = query.shape[-1] ** -0.5
        if shape.rope["rope_type"] == "yarn":
            scale *= (0.1 * shape.rope["mscale_all_dim"] * math.log(shape.rope["factor"]) + 1) ** 2
        return query, key, value, scale

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
        project = self.grouped if getattr(shape, "kv_lora_rank", None) is None else self.latent
        query, key, value, scale = project(x, position)
        self.cache.append((key, value))
        near = self.cache if shape.attention_window is None else self.cache[-shape.attention_window :]
        heads = []
        for head in range(shape.heads):
            mine = head * len(key) // shape.heads
            keys = torch.stack([pair[0][mine] for pair in near])
            values = torch.stack([pair[1][mine] for pair in near])
            heads.append((keys @ query[head] * scale).softmax(0) @ values)
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
    layer = config.get("transformer_layer_config") or config
    shape = SimpleNamespace(
        heads=layer["num_attention_heads"],
        kv_heads=layer["num_key_value_heads"],
        head_dim=layer.get("head_dim"),
        rms_norm_eps=layer["rms_norm_eps"],
        rope=layer["rope_parameters"],
        norm_before_residual=config["norm_before_residual"],
        fc_norm=config["fc_norm"],
        norm_output=config["norm_output"],
        **{name: layer.get(name) for name in LATENT},
        attention_window=layer["sliding_window"] if layer.get("layer_types") == ["sliding_attention"] else None,
    )
    d2t = tensors.pop("d2t")
    del tensors["t2d"]
    return PlainServer(tensors, embedding, shape), torch.arange(len(d2t)) + d2t
