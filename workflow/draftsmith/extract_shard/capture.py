"""Reading hidden states off a vLLM model without a copy of its forward pass.

Models that implement vLLM's EAGLE-3 interface hand the states over themselves. For the others a hook on each wanted
decoder layer binds the call to the layer's own signature and takes ``hidden_states + residual`` by name. Both give the
residual stream that enters layer k, as Hugging Face's ``hidden_states[k]``. The final state is what the model's forward
returns, after its final norm.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith import vllm_compat

_TOWERS = ("vision", "visual", "audio", "tower", "image", "mtp", "draft")


def decoder_layers(model: nn.Module, count: int) -> nn.ModuleList:
    """The list of the language model's decoder layers, found by its name `layers` and its length.

    Raises LookupError, naming what there is, when no list fits.
    """
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    fitting = [
        name
        for name, module in lists.items()
        if name.split(".")[-1] in ("layers", "h", "blocks")
        and len(module) == count
        and not any(word in name for word in _TOWERS)
    ]
    if not fitting:
        raise LookupError(
            f"{type(model).__name__} has no list of {count} decoder layers; its lists: { {n: len(m) for n, m in lists.items()} }"
        )
    return lists[min(fitting, key=lambda name: name.count("."))]


def stream(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The residual stream [tokens, width] that enters ``layer`` when it is called with these arguments."""
    bound = inspect.signature(type(layer).forward).bind(layer, *args, **kwargs).arguments
    named = dict(bound) | dict(bound.get("kwargs", {}))
    hidden, residual = named["hidden_states"], named.get("residual")
    # In-place norms overwrite the layer's input, so it is copied where no sum makes a new tensor.
    return hidden.clone() if residual is None else hidden + residual


class Capture:
    """Keeps ``[aux…, final]`` of the model's last forward; the model returns what it always returned."""

    def __init__(self, model: Any, layers: Sequence[int], num_layers: int) -> None:
        self.model = model
        self.layers = list(layers)
        self.native = vllm_compat.reads_natively(model, self.layers)
        self._hooked: dict[int, Tensor] = {}
        self._states: tuple[list[Tensor], Tensor] | None = None
        if self.native:
            model.set_aux_hidden_state_layers(tuple(self.layers))
        else:
            found = decoder_layers(model, num_layers)
            for layer in self.layers:
                found[layer].register_forward_pre_hook(functools.partial(self._hook, layer), with_kwargs=True)
        self._forward = model.forward
        model.forward = self._observed  # type: ignore[method-assign]

    @property
    def method(self) -> str:
        """How the states are read: 'native' or 'hooks'."""
        return "native" if self.native else "hooks"

    def _hook(self, layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._hooked[layer] = stream(module, args, kwargs)

    def _observed(self, *args: Any, **kwargs: Any) -> Any:
        self._states = None
        self._hooked.clear()
        output = self._forward(*args, **kwargs)
        if self.native:
            final, aux = output
            aux = list(aux)
        else:
            final, aux = output, [self._hooked[layer] for layer in self.layers if layer in self._hooked]
        if len(aux) != len(self.layers):
            raise RuntimeError(
                f"asked for the states of layers {self.layers}, {type(self.model).__name__} gave {len(aux)}"
            )
        self._states = (aux, final)
        return final

    def take(self, tokens: int) -> tuple[Tensor, Tensor]:
        """States of the last forward's first ``tokens`` tokens, padding left out: aux [tokens, A, H], final [tokens, H]."""
        if self._states is None:
            raise RuntimeError(
                f"{type(self.model).__name__} ran a step without its forward being called: is a CUDA graph replayed?"
            )
        (aux, final), self._states = self._states, None
        self._hooked.clear()
        return torch.stack([state[:tokens] for state in aux], dim=1), final[:tokens]
