"""Hooks read the stream that enters a layer, however the layer is called and whatever it returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftsmith.extract_shard.capture import decoder_layers, stream

HIDDEN, RESIDUAL = torch.arange(6.0).view(2, 3), torch.ones(2, 3)


class Llama(nn.Module):
    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> Any:
        raise NotImplementedError


class DeepSeek(nn.Module):
    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None, llama_4_scaling: Tensor | None = None
    ) -> Any:
        raise NotImplementedError


class GptOss(nn.Module):
    def forward(self, hidden_states: Tensor, positions: Tensor, residual: Tensor | None) -> Any:
        raise NotImplementedError


class Granite(nn.Module):
    def forward(self, positions: Tensor, hidden_states: Tensor) -> Any:
        raise NotImplementedError


class Gemma(nn.Module):
    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None, **kwargs: Any) -> Any:
        raise NotImplementedError


POSITIONS = torch.arange(2)


@pytest.mark.parametrize(
    ("layer", "args", "kwargs"),
    [
        (Llama, (POSITIONS, HIDDEN, RESIDUAL), {}),
        (Llama, (), {"positions": POSITIONS, "hidden_states": HIDDEN, "residual": RESIDUAL}),
        (DeepSeek, (POSITIONS, HIDDEN, RESIDUAL, None), {}),
        (GptOss, (HIDDEN, POSITIONS, RESIDUAL), {}),
        (Gemma, (POSITIONS, HIDDEN), {"residual": RESIDUAL, "per_layer": 1}),
        (Gemma, (POSITIONS,), {"hidden_states": HIDDEN, "residual": RESIDUAL}),
    ],
)
def test_hidden_and_residual_are_found_by_name(
    layer: type[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    assert torch.equal(stream(layer(), args, kwargs), HIDDEN + RESIDUAL)


@pytest.mark.parametrize(("layer", "args"), [(Granite, (POSITIONS, HIDDEN)), (Llama, (POSITIONS, HIDDEN, None))])
def test_without_a_residual_the_stream_is_copied(layer: type[nn.Module], args: tuple[Any, ...]) -> None:
    """An in-place norm in the layer must not change what was captured."""
    read = stream(layer(), args, {})
    assert torch.equal(read, HIDDEN)
    assert read.data_ptr() != HIDDEN.data_ptr()


def test_the_language_models_layers_are_found_beside_a_vision_tower() -> None:
    model = nn.Module()
    model.vision_tower = nn.Module()
    model.vision_tower.layers = nn.ModuleList([Llama() for _ in range(4)])
    model.language_model = nn.Module()
    model.language_model.model = nn.Module()
    model.language_model.model.layers = nn.ModuleList([DeepSeek() for _ in range(4)])
    assert decoder_layers(model, 4) is model.language_model.model.layers


def test_a_model_without_such_a_list_is_told() -> None:
    model = nn.Module()
    model.stack = nn.ModuleList([Llama()])
    with pytest.raises(LookupError, match=r"has no list of 4 decoder layers; its lists: \{'stack': 1\}"):
        decoder_layers(model, 4)
