"""The EAGLE-3 draft as a module, computing in training exactly what vLLM computes in serving.

There it is Eagle3LlamaForCausalLM, or Eagle3DeepseekV2ForCausalLM with latent attention. Parameters carry the names under which
vLLM loads them. The embedding is the target's, frozen, and no parameter: it is neither trained, nor saved, nor exported, since
the server shares the target's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftsmith.draft import self_attention
from draftsmith.draft.attention import Segment, chosen
from draftsmith.draft.parts import RMSNorm, cast
from draftsmith.draft.slots import left_at, take
from draftsmith.draft.transfer import moved

if TYPE_CHECKING:
    from draftsmith.draft.attention import Kind
    from draftsmith.draft.config import DraftShape


class Rows(Protocol):
    """What the draft reads of a pack: rows laid end to end, each cut to its slots 1 .. M.

    M is the row's last slot that counts; nothing behind it is seen by a slot that counts.
    """

    input_ids: Tensor
    """int64 [S]: token x_i of slot i."""
    positions: Tensor
    """int64 [S]: i, the slot's position in its row."""
    aux: Tensor
    """[S, layers x H]: g_{i-1}, the target's states one token earlier, concatenated by ascending layer."""
    slots: Tensor
    """int64 [N]: index in 0 .. S-1 of each slot that counts at step 0, ascending."""
    depth: Tensor
    """int64 [N], on the CPU: at how many steps it counts."""
    widths: list[int]
    """Slots of each row; they sum to S."""
    counted: list[int]
    """Slots of each row that count at step 0; they sum to N, and none is 0."""
    firsts: list[int]
    """Index in 0 .. S-1 of each row's first slot that counts."""


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)


class Matrices(NamedTuple):
    """The layer's matrices as the steps multiply by them, [out, in] each.

    Cast once for all steps, and not by each: so their gradients are also summed over the steps before they are cast back.
    """

    attention: self_attention.Matrices
    gate: Tensor
    up: Tensor
    down: Tensor


class Layer(nn.Module):
    """The draft's decoder layer."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = (
            self_attention.GroupedAttention(shape)
            if shape.latent is None
            else self_attention.LatentAttention(shape, shape.latent)
        )
        self.mlp = MLP(shape)

    def matrices(self) -> Matrices:
        """Its matrices in the precision of matrix products."""
        mlp = self.mlp
        return Matrices(
            self.self_attn.matrices(), cast(mlp.gate_proj.weight), cast(mlp.up_proj.weight), cast(mlp.down_proj.weight)
        )


class Eagle3Draft(nn.Module):
    """One decoder layer between the target's states and its own head over the draft vocabulary."""

    embed_tokens: Tensor

    def __init__(self, shape: DraftShape, embedding: Tensor) -> None:
        """``embedding`` [target vocabulary, H] is the target's, in any dtype."""
        super().__init__()
        self.shape = shape
        self.register_buffer("embed_tokens", embedding, persistent=False)
        self.rotary = LlamaRotaryEmbedding(shape.rotated())
        self.fc = nn.Linear(len(shape.layers) * shape.hidden_size, shape.hidden_size, bias=False)
        if shape.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(shape.hidden_size, shape.rms_norm_eps) for _ in shape.layers)
        self.layers = nn.ModuleList([Layer(shape)])
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab, bias=False)
        self._attend = chosen("auto", "cpu")

    def combine(self, aux: Tensor) -> Tensor:
        """Hidden state of step 0: [T, layers x H] -> [T, H]."""
        if self.shape.fc_norm:
            parts = aux.unflatten(-1, (len(self.shape.layers), -1)).unbind(-2)
            aux = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        # Where autocast is on it casts by itself, and a detour over float32 would be the largest tensor of all.
        return self.fc(aux if torch.is_autocast_enabled(aux.device.type) else aux.to(self.fc.weight.dtype))

    def prepare(self, attention: Kind, device: str, fuse: bool) -> None:
        """Choose the form of attention and whether torch.compile fuses what lies around it, for rows on ``device``."""
        self._attend = chosen(attention, device, fuse)
        for name in ("_both", "_key_and_value", "_query", "_rest"):
            method = getattr(type(self), name)
            # Sizes change with every pack, so none is compiled in.
            setattr(self, name, torch.compile(method, dynamic=True).__get__(self) if fuse else method.__get__(self))

    def forward(self, rows: Rows, steps: int) -> list[Tensor]:
        """Run ``steps`` steps of the training-time test (:mod:`draftsmith.draft.slots`).

        Returns for each step k the input of lm_head [N_k, H], float32, for the entries of ``rows.slots`` with depth > k,
        in their order; fewer than ``steps`` where no slot counts any more.
        """
        embedded = functional.embedding(rows.input_ids, self.embed_tokens)
        hidden = self.combine(rows.aux)
        both, residual = self._both(embedded, hidden)
        cos, sin = self._rotation(rows.positions, both)
        by = self._layer().matrices()
        key, value = self._key_and_value(both, cos, sin, *by.attention.key_value)

        window = self.shape.attention_window
        slots = rows.slots
        both, residual, cos, sin = take(both, slots), take(residual, slots), cos[slots], sin[slots]
        own: list[tuple[Tensor, Tensor]] = []
        left = torch.arange(len(rows.depth))
        outputs: list[Tensor] = []
        fed_back = hidden
        for step in range(steps):
            if step:
                still = left_at(rows.depth[left], step)
                left = left[still]
                if not len(left):
                    break
                still = moved(still, slots.device)
                slots = slots[still]
                both, residual = self._both(embedded[slots + step], take(fed_back, still))
                cos, sin = self._rotation(rows.positions[slots] + step, both)
                own = [(take(each_key, still), take(each_value, still)) for each_key, each_value in own]
                own.append(self._key_and_value(both, cos, sin, *by.attention.key_value))
            query = self._query(both, cos, sin, *by.attention.query)
            reach, near = None, own
            if window is not None:
                # The query stands at its slot's position + step, and an own key of step j at that + j.
                reach, near = window - step, own[-window:]
            mixed = self._attend(query, key, value, near, slots, _segments(rows, left), reach)
            output, fed_back = self._rest(mixed, residual, by.attention.output, by.gate, by.up, by.down)
            outputs.append(output)
        return outputs

    def _both(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What attention projects, [T, 2H], and the layer's residual, [T, H], for embeddings and hidden states [T, H]."""
        layer = self._layer()
        normed = layer.hidden_norm(hidden)
        # Embeddings are normed anew at each step: they come without a gradient, which would have to be put back in place.
        return torch.cat(
            [cast(layer.input_layernorm(embedded)), cast(normed)], -1
        ), normed if self.shape.norm_before_residual else hidden

    def _key_and_value(self, both: Tensor, cos: Tensor, sin: Tensor, *by: Tensor) -> tuple[Tensor, Tensor]:
        return self._layer().self_attn.key_and_value(both, cos, sin, by)

    def _query(self, both: Tensor, cos: Tensor, sin: Tensor, *by: Tensor) -> Tensor:
        return self._layer().self_attn.query(both, cos, sin, by)

    def _layer(self) -> Layer:
        return self.layers[0]  # type: ignore[return-value]

    def _rest(
        self, mixed: Tensor, residual: Tensor, o: Tensor, gate: Tensor, up: Tensor, down: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The layer behind attention, and the final norm: lm_head's input and the hidden state that the next step takes."""
        layer = self._layer()
        residual = residual + functional.linear(layer.self_attn.joined(mixed), o)
        normed = cast(layer.post_attention_layernorm(residual))
        gated = functional.silu(functional.linear(normed, gate)) * functional.linear(normed, up)
        # vLLM calls this sum hidden_prenorm: it is what the next step is fed with, unless norm_output is set.
        before = functional.linear(gated, down) + residual
        output = self.norm(before)
        return output, output if self.shape.norm_output else before

    def _rotation(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, d], float32, of int64 positions [T]."""
        cos, sin = self.rotary(like.float()[:0], positions[None])
        return cos[0][:, None], sin[0][:, None]


def _segments(rows: Rows, left: Tensor) -> list[Segment]:
    """The rows of a pack with the queries that they still have; ``left`` int64 [N_k] indexes the slots that counted at step 0."""
    segments = []
    ends = torch.searchsorted(left, torch.tensor(rows.counted, dtype=torch.int64).cumsum(0)).tolist()
    query = key = 0
    for width, end, first in zip(rows.widths, ends, rows.firsts, strict=True):
        segments.append(Segment(query, end, key, key + width, first))
        query, key = end, key + width
    return segments
