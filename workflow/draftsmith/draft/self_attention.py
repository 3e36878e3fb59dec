"""Projections of the draft's attention, whose input is the embedding beside the hidden state, 2H wide.

Two kinds, with parameters named as vLLM loads them: grouped-query attention as Llama has it, and multi-head latent attention as
DeepSeek-V2 introduced it (https://arxiv.org/abs/2405.04434, section 2.1), for targets that have it themselves. A server of the
latter caches one small latent vector and one rotated key a token; in training keys and values are written out for every head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from draftsmith.draft.config import DraftShape
from draftsmith.draft.latent import Latent
from draftsmith.draft.parts import RMSNorm, cast, rotate


class Matrices(NamedTuple):
    """The projections' matrices, [out, in] each, as the steps multiply by them."""

    query: tuple[Tensor, ...]
    key_value: tuple[Tensor, ...]
    output: Tensor


class GroupedAttention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(2 * shape.hidden_size, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden_size, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden_size, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden_size, bias=False)

    def matrices(self) -> Matrices:
        """Its matrices in the precision of matrix products."""
        return Matrices(
            (cast(self.q_proj.weight),),
            (cast(self.k_proj.weight), cast(self.v_proj.weight)),
            cast(self.o_proj.weight),
        )

    def query(self, both: Tensor, cos: Tensor, sin: Tensor, by: tuple[Tensor, ...]) -> Tensor:
        """Queries [T, heads, d] of ``both`` [T, 2H], turned by cos and sin [T, 1, d]."""
        return rotate(self._heads(functional.linear(both, by[0])), cos, sin)

    def key_and_value(self, both: Tensor, cos: Tensor, sin: Tensor, by: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Keys and values [T, kv heads, d]."""
        return rotate(self._heads(functional.linear(both, by[0])), cos, sin), self._heads(
            functional.linear(both, by[1])
        )

    def joined(self, mixed: Tensor) -> Tensor:
        """What attention gives, [T, heads, d], as o_proj takes it."""
        return mixed.flatten(-2)

    def _heads(self, x: Tensor) -> Tensor:
        """[T, heads x d] -> [T, heads, d]."""
        return x.unflatten(-1, (-1, self.head_dim))


class LatentAttention(nn.Module):
    """Multi-head latent attention; d is the width of a query, of which the last ``qk_rope_head_dim`` are turned."""

    def __init__(self, shape: DraftShape, latent: Latent) -> None:
        super().__init__()
        self.latent, self.heads = latent, shape.heads
        self.head_dim = latent.qk_nope_head_dim + latent.qk_rope_head_dim
        both, eps = 2 * shape.hidden_size, shape.rms_norm_eps
        queries = shape.heads * self.head_dim
        self.q_a_proj = nn.Linear(both, latent.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(latent.q_lora_rank, eps)
        self.q_b_proj = nn.Linear(latent.q_lora_rank, queries, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(both, latent.kv_lora_rank + latent.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(latent.kv_lora_rank, eps)
        self.kv_b_proj = nn.Linear(
            latent.kv_lora_rank, shape.heads * (latent.qk_nope_head_dim + latent.v_head_dim), bias=False
        )
        self.o_proj = nn.Linear(shape.heads * latent.v_head_dim, shape.hidden_size, bias=False)
        # Attention divides by the root of d alone.
        self.sharpened = latent.sharpening(shape.rope)

    def matrices(self) -> Matrices:
        """Its matrices in the precision of matrix products."""
        return Matrices(
            (cast(self.q_a_proj.weight), cast(self.q_b_proj.weight)),
            (cast(self.kv_a_proj_with_mqa.weight), cast(self.kv_b_proj.weight)),
            cast(self.o_proj.weight),
        )

    def query(self, both: Tensor, cos: Tensor, sin: Tensor, by: tuple[Tensor, ...]) -> Tensor:
        """Queries [T, heads, d] of ``both`` [T, 2H]; cos and sin are [T, 1, qk_rope_head_dim]."""
        x = functional.linear(cast(self.q_a_layernorm(functional.linear(both, by[0]))), by[1])
        plain, turned = x.unflatten(-1, (self.heads, -1)).split(self._parts(), -1)
        return torch.cat([plain, rotate(_interleaved(turned), cos, sin)], -1) * self.sharpened

    def key_and_value(self, both: Tensor, cos: Tensor, sin: Tensor, by: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Keys and values [T, heads, d]; values are followed by zeros, since kernels want both of one width."""
        low, turned = functional.linear(both, by[0]).split([self.latent.kv_lora_rank, self.latent.qk_rope_head_dim], -1)
        high = functional.linear(cast(self.kv_a_layernorm(low)), by[1]).unflatten(-1, (self.heads, -1))
        plain, value = high.split([self.latent.qk_nope_head_dim, self.latent.v_head_dim], -1)
        # All heads share the turned part.
        turned = rotate(_interleaved(turned[:, None]), cos, sin).expand(-1, self.heads, -1)
        return torch.cat([plain, turned], -1), functional.pad(value, (0, self.head_dim - self.latent.v_head_dim))

    def joined(self, mixed: Tensor) -> Tensor:
        """What attention gives, [T, heads, d], as o_proj takes it."""
        return mixed[..., : self.latent.v_head_dim].flatten(-2)

    def _parts(self) -> list[int]:
        return [self.latent.qk_nope_head_dim, self.latent.qk_rope_head_dim]


def _interleaved(x: Tensor) -> Tensor:
    """Neighbours as halves: DeepSeek's checkpoints have the two numbers that are turned together beside one another."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
