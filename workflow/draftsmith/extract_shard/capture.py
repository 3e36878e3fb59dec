"""Reading hidden states off a vLLM model without a copy of its forward pass.

Models that implement vLLM's EAGLE-3 interface hand the states over themselves. For the others a hook on each wanted
decoder layer binds the call to the layer's own signature and takes ``hidden_states + residual`` by name. Both give the
residual stream that enters layer k, as Hugging Face's ``hidden_states[k]``. The final state is what the model's forward
returns, after its final norm. Where it is not certain that this is what is read, there is an :class:`Unreadable` and no state.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith import vllm_compat
from draftsmith.errors import DraftsmithError

_TOWERS = ("vision", "visual", "audio", "tower", "image", "mtp", "draft")
# Of the stream's shape, and known to be no part of it: Zamba2 hands the embeddings to every layer.
_BESIDE = ("original_hidden_states",)
_OTHERWISE = "engine.args {model_impl: transformers} reads it by another implementation"


class Unreadable(DraftsmithError):
    """The states of this model cannot be read for certain; the sentence names the class and what is in the way."""


def decoder_layers(model: nn.Module, count: int) -> nn.ModuleList:
    """The list of the language model's ``count`` decoder layers.

    Raises :class:`Unreadable`, naming what there is, when none fits or more than one does.
    """
    text = _language_model(model)
    lists = {name: module for name, module in text.named_modules() if isinstance(module, nn.ModuleList)}
    fitting = [
        name
        for name, module in lists.items()
        if name.split(".")[-1] in ("layers", "h", "blocks")
        and len(module) == count
        and not any(word in name for word in _TOWERS)
    ]
    depth = min((name.count(".") for name in fitting), default=0)
    outermost = [name for name in fitting if name.count(".") == depth]
    if len(outermost) != 1:
        raise Unreadable(
            f"{type(model).__name__} has {len(outermost) or 'no'} lists of {count} decoder layers "
            f"(its lists: { {name: len(module) for name, module in lists.items()} }); {_OTHERWISE}"
        )
    found = lists[outermost[0]]
    if any(type(layer).__name__ == "PPMissingLayer" for layer in found):
        raise Unreadable(f"{outermost[0]} is spread over pipeline stages; set engine.args.pipeline_parallel_size to 1")
    return found


def _language_model(model: nn.Module) -> nn.Module:
    # Multimodal classes have it; some of them have nothing to give when they run as pure language models.
    try:
        found = model.get_language_model()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return model
    return found if isinstance(found, nn.Module) else model


class StreamReader:
    """Takes the residual stream that enters one decoder layer out of a call of it, by the names of its parameters."""

    def __init__(self, layer: nn.Module) -> None:
        """Raises :class:`Unreadable`, naming class and signature, when no parameter is called hidden_states."""
        # torch.compile keeps the module that it wraps.
        layer = getattr(layer, "_orig_mod", layer)
        self.name = type(layer).__name__
        signatures = [_signature(layer.forward), _signature(functools.partial(type(layer).forward, layer))]
        known = [signature for signature in signatures if signature and "hidden_states" in signature.parameters]
        if not known:
            shown = next((str(signature) for signature in reversed(signatures) if signature), "(?)")
            raise Unreadable(
                f"{self.name}.forward{shown} has no parameter hidden_states, so what enters it is unknown; {_OTHERWISE}"
            )
        self.signature = known[0]
        self._rest = next((p.name for p in self.signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """The stream [tokens, width] of a call with these arguments, in memory of its own."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        named = dict(bound.arguments)
        named |= named.pop(self._rest, {}) if self._rest else {}
        hidden, residual = named.pop("hidden_states"), named.pop("residual", None)
        if not isinstance(hidden, Tensor) or not (residual is None or _alike(residual, hidden)):
            raise Unreadable(
                f"{self.name}.forward{self.signature} was given hidden_states {_shown(hidden)} and residual {_shown(residual)}; "
                f"{_OTHERWISE}"
            )
        for name, value in named.items():
            # Some classes put off an addition, and hand on what is still to be added.
            if name not in _BESIDE and any(_alike(part, hidden) for part in _parts(value)):
                raise Unreadable(
                    f"{self.name}.forward{self.signature}: {name} has the shape of the hidden states and may be a part of them; {_OTHERWISE}"
                )
        # In-place norms overwrite the layer's input, so it is copied where no sum makes a new tensor.
        return hidden.clone() if residual is None else hidden + residual


def _alike(value: Any, hidden: Tensor) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape == hidden.shape


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for part in value:
            yield from _parts(part)
    else:
        yield value


def _shown(value: Any) -> str:
    return f"{list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _signature(call: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(call)
    except (TypeError, ValueError):
        return None


def stream(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The residual stream [tokens, width] that enters ``layer`` when it is called with these arguments."""
    return StreamReader(layer)(args, kwargs)


class Capture:
    """Keeps ``[aux…, final]`` of the model's last forward; the model returns what it always returned."""

    def __init__(self, model: Any, layers: Sequence[int], num_layers: int) -> None:
        """``layers`` are ascending; raises :class:`Unreadable` when they cannot be read off ``model``."""
        self.model = model
        self.layers = list(layers)
        self._hooked: dict[int, Tensor] = {}
        self._states: tuple[list[Tensor], Tensor] | None = None
        self.native = vllm_compat.reads_natively(model, self.layers) and self._set_natively()
        if not self.native:
            found = decoder_layers(model, num_layers)
            for layer in self.layers:
                hook = functools.partial(self._hook, layer, StreamReader(found[layer]))
                found[layer].register_forward_pre_hook(hook, with_kwargs=True)
        self._forward = model.forward
        model.forward = self._observed  # type: ignore[method-assign]

    def _set_natively(self) -> bool:
        try:
            self.model.set_aux_hidden_state_layers(tuple(self.layers))
        except (AssertionError, AttributeError):
            # A wrapper has the interface and the language model inside of it has not.
            return False
        return True

    @property
    def method(self) -> str:
        """How the states are read: 'native' or 'hooks'."""
        return "native" if self.native else "hooks"

    def _hook(
        self, layer: int, reader: StreamReader, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if layer in self._hooked:
            raise Unreadable(
                f"layer {layer}, a {reader.name}, is called twice in one forward: which of its inputs counts is unknown; {_OTHERWISE}"
            )
        self._hooked[layer] = reader(args, kwargs)

    def _observed(self, *args: Any, **kwargs: Any) -> Any:
        self._states = None
        self._hooked.clear()
        output = self._forward(*args, **kwargs)
        aux: list[Tensor]
        if not self.native:
            final, aux = output, [self._hooked[layer] for layer in self.layers if layer in self._hooked]
        elif isinstance(output, tuple) and len(output) == 2:
            final, aux = output[0], list(output[1])
        else:
            final, aux = output, []
        if len(aux) != len(self.layers):
            raise Unreadable(
                f"asked for the states of layers {self.layers}, {type(self.model).__name__} gave {len(aux)} by {self.method}; "
                "compiled layers give none: is engine.enforce_eager true?"
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
        width = tuple(getattr(final, "shape", ()))[1:]
        for layer, state in zip([*self.layers, "final"], [*aux, final], strict=True):
            # Streams of several parts, and those that are dealt out over the ranks, are of another shape.
            shape = tuple(getattr(state, "shape", ()))
            if len(shape) != 2 or shape[0] < tokens or shape[1:] != width:
                raise Unreadable(
                    f"{type(self.model).__name__}: the state of layer {layer} is a {type(state).__name__} of {list(shape)} by {self.method}, "
                    f"for {tokens} tokens and a final state of width {list(width)}; {_OTHERWISE}"
                )
        return torch.stack([state[:tokens] for state in aux], dim=1), final[:tokens]
