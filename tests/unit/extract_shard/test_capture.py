"""What enters a layer is read however the layer is called and whatever it returns, or it is told why it cannot be."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftsmith.extract_shard.capture import Capture, StreamReader, Unreadable, decoder_layers, stream

HIDDEN, RESIDUAL = torch.arange(6.0).view(2, 3), torch.ones(2, 3)
POSITIONS = torch.arange(2)


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


class KeywordOnly(nn.Module):
    def forward(self, *, hidden_states: Tensor, residual: Tensor | None = None) -> Any:
        raise NotImplementedError


class Rest(nn.Module):
    """Its residual comes along with whatever else there is."""

    def forward(self, positions: Tensor, hidden_states: Tensor, **rest: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("layer", "args", "kwargs"),
    [
        (Llama, (POSITIONS, HIDDEN, RESIDUAL), {}),
        (Llama, (), {"positions": POSITIONS, "hidden_states": HIDDEN, "residual": RESIDUAL}),
        (DeepSeek, (POSITIONS, HIDDEN, RESIDUAL, None), {}),
        (DeepSeek, (POSITIONS, HIDDEN, RESIDUAL, torch.ones(2, 1)), {}),
        (GptOss, (HIDDEN, POSITIONS, RESIDUAL), {}),
        (Gemma, (POSITIONS, HIDDEN), {"residual": RESIDUAL, "per_layer": 1}),
        (Gemma, (POSITIONS,), {"hidden_states": HIDDEN, "residual": RESIDUAL}),
        (KeywordOnly, (), {"hidden_states": HIDDEN, "residual": RESIDUAL}),
        (Rest, (POSITIONS,), {"hidden_states": HIDDEN, "residual": RESIDUAL, "more": None}),
    ],
)
def test_hidden_and_residual_are_found_by_name(
    layer: type[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    assert torch.equal(stream(layer(), args, kwargs), HIDDEN + RESIDUAL)


@pytest.mark.parametrize(
    ("layer", "args", "kwargs"),
    [
        (Granite, (POSITIONS, HIDDEN), {}),
        (Llama, (POSITIONS, HIDDEN, None), {}),
        (KeywordOnly, (), {"hidden_states": HIDDEN}),
        (Rest, (POSITIONS, HIDDEN), {}),
    ],
)
def test_without_a_residual_the_stream_is_copied(
    layer: type[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """An in-place norm in the layer must not change what was captured."""
    read = stream(layer(), args, kwargs)
    assert torch.equal(read, HIDDEN)
    assert read.data_ptr() != HIDDEN.data_ptr()


def _wrapped(layer: nn.Module) -> nn.Module:
    inner = layer.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    layer.forward = forward
    return layer


def _nameless(layer: nn.Module) -> nn.Module:
    inner = layer.forward
    layer.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    return layer


def _partial(layer: nn.Module) -> nn.Module:
    layer.forward = functools.partial(layer.forward, llama_4_scaling=None)
    return layer


@pytest.mark.parametrize("wrap", [_wrapped, _nameless, _partial, functools.partial(torch.compile, backend="eager")])
def test_a_wrapped_forward_is_seen_through(wrap: Callable[[nn.Module], nn.Module]) -> None:
    layer = wrap(DeepSeek())
    assert torch.equal(stream(layer, (POSITIONS, HIDDEN, RESIDUAL), {}), HIDDEN + RESIDUAL)


def test_what_a_partial_call_is_given_beforehand_counts() -> None:
    layer = Llama()
    layer.forward = functools.partial(layer.forward, residual=RESIDUAL)
    assert torch.equal(stream(layer, (POSITIONS, HIDDEN), {}), HIDDEN + RESIDUAL)


class Unnamed(nn.Module):
    def forward(self, x: Tensor, positions: Tensor) -> Any:
        raise NotImplementedError


class Hidden(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("layer", "signature"),
    [(Unnamed, r"\(x: 'Tensor', positions: 'Tensor'\)"), (Hidden, r"\(\*args: 'Any', \*\*kwargs: 'Any'\)")],
)
def test_without_a_parameter_of_that_name_class_and_signature_are_told(layer: type[nn.Module], signature: str) -> None:
    with pytest.raises(Unreadable, match=rf"^{layer.__name__}\.forward{signature}.* has no parameter hidden_states"):
        StreamReader(layer())


class Deferred(nn.Module):
    """Its input is the stream less what `pending` holds; `scale` and `embeddings` are no part of it."""

    def forward(self, hidden_states: Tensor, pending: Any = None, scale: Tensor | None = None) -> Any:
        raise NotImplementedError


class Zamba(nn.Module):
    def forward(self, hidden_states: Tensor, original_hidden_states: Tensor) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("pending", [RESIDUAL, (RESIDUAL, None), (None, [RESIDUAL])])
def test_another_tensor_of_the_streams_shape_is_refused(pending: Any) -> None:
    layer = Deferred()
    with pytest.raises(
        Unreadable, match=r"^Deferred\.forward.*: pending has the shape of the hidden states and may be"
    ):
        stream(layer, (HIDDEN, pending), {})
    for scale in (torch.ones(2, 1), torch.ones(2, 3, dtype=torch.bool)):
        assert torch.equal(stream(layer, (HIDDEN, None, scale), {}), HIDDEN)
    assert torch.equal(stream(Zamba(), (HIDDEN, RESIDUAL), {}), HIDDEN)


@pytest.mark.parametrize(
    ("hidden", "residual"), [((HIDDEN, HIDDEN), None), (HIDDEN, torch.ones(3)), (HIDDEN, (RESIDUAL,))]
)
def test_what_is_no_stream_is_refused(hidden: Any, residual: Any) -> None:
    with pytest.raises(Unreadable, match=r"^Llama\.forward.* was given hidden_states .* and residual "):
        stream(Llama(), (POSITIONS, hidden, residual), {})


# The calling conventions of vLLM's layers: p positions, h hidden states, r residual, by position; a name, by keyword.
VLLM = {
    "bailing_moe:BailingMoeBlock": "hpr",
    "chatglm:GLMBlock": "hp",
    "commandr:CohereDecoderLayer": "phr",
    "dbrx:DbrxBlock": "ph",
    "deepseek_v2:DeepseekV2DecoderLayer": "phr0",
    "falcon:FalconDecoderLayer": "ph",
    "gemma:GemmaDecoderLayer": "phr",
    "gemma2:Gemma2DecoderLayer": "phr",
    "gemma3:Gemma3DecoderLayer": "phr",
    "glm4:Glm4DecoderLayer": "phr",
    "glm4_moe:Glm4MoeDecoderLayer": "phr",
    "gpt2:GPT2Block": "h",
    "gpt_j:GPTJBlock": "ph",
    "gpt_oss:TransformerBlock": "hpr",
    "granite:GraniteDecoderLayer": "ph",
    "jamba:JambaMambaDecoderLayer": "positions hidden_states residual",
    "llama:LlamaDecoderLayer": "phr",
    "minimax_m2:MiniMaxM2DecoderLayer": "phr",
    "mistral:MistralDecoderLayer": "phr0",
    "mixtral:MixtralDecoderLayer": "phr",
    "nemotron_h:NemotronHAttentionDecoderLayer": "positions hidden_states residual",
    "nemotron_h:NemotronHMLPDecoderLayer": "positions hidden_states residual",
    "olmoe:OlmoeDecoderLayer": "phr",
    "opt:OPTDecoderLayer": "h",
    "qwen2:Qwen2DecoderLayer": "phr",
    "qwen2_moe:Qwen2MoeDecoderLayer": "phr",
    "qwen3:Qwen3DecoderLayer": "phr",
    "qwen3_moe:Qwen3MoeDecoderLayer": "phr",
    "qwen3_next:Qwen3NextDecoderLayer": "positions hidden_states residual",
}


@pytest.mark.parametrize("layer", VLLM)
def test_vllms_own_layers_are_read_as_their_models_call_them(layer: str) -> None:
    module, name = layer.split(":")
    kind = getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), name)
    given: dict[str, Any] = {"positions": POSITIONS, "hidden_states": HIDDEN, "residual": RESIDUAL}
    convention = VLLM[layer]
    if " " in convention:
        args, kwargs = (), {name: given[name] for name in convention.split()}
    else:
        args, kwargs = (
            tuple(dict(zip("phr0", [*given.values(), None], strict=True))[letter] for letter in convention),
            {},
        )
    expected = HIDDEN + RESIDUAL if "r" in convention else HIDDEN
    # As bare as it can be made, since only its signature is looked at.
    assert torch.equal(stream(kind.__new__(kind), args, kwargs), expected)


class Block(nn.Module):
    """Adds its number to the stream in one of vLLM's ways of handing it on, and spoils its input afterwards, as in-place norms do."""

    def __init__(self, number: int, way: str) -> None:
        super().__init__()
        self.number, self.way = number, way

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None = None) -> Any:
        stream = hidden_states if residual is None else hidden_states + residual
        branch = torch.full_like(stream, float(self.number))
        out = {"tensor": stream + branch, "pair": (branch, stream.clone()), "none": (stream + branch, None)}[self.way]
        hidden_states.fill_(-1)
        return out


class Model(nn.Module):
    """Four layers; layer k adds k + 1, the final norm doubles."""

    def __init__(self, way: str = "pair", aside: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(k + 1, way) for k in range(4)])
        self.aside = aside
        """Layers at the end that are run without being called."""
        self.twice = False

    def forward(self, hidden: Tensor) -> Any:
        residual = None
        for place, layer in enumerate(self.layers):
            call = layer.forward if place >= 4 - self.aside else layer
            out = call(POSITIONS, hidden, residual)
            hidden, residual = out if isinstance(out, tuple) else (out, None)
            if self.twice:
                layer(POSITIONS, hidden.clone(), residual)
        return 2 * (hidden if residual is None else hidden + residual)


@pytest.fixture(scope="session")
def native() -> type[nn.Module]:
    """The same model with vLLM's EAGLE-3 interface."""
    from vllm.model_executor.models.interfaces import EagleModelMixin, SupportsEagle3

    class Inner(Model, EagleModelMixin):
        def forward(self, hidden: Tensor) -> Any:
            aux: list[Tensor] = []
            for place, layer in enumerate(self.layers):
                if place in self.aux_hidden_state_layers:
                    aux.append(hidden.clone())
                hidden = layer(POSITIONS, hidden)
            return (2 * hidden, aux) if aux else 2 * hidden

    class Native(nn.Module, SupportsEagle3):
        def __init__(self, inner: nn.Module | None = None) -> None:
            super().__init__()
            self.model = inner or Inner("tensor")

        def forward(self, hidden: Tensor) -> Any:
            return self.model(hidden)

    return Native


def captured(model: nn.Module, layers: list[int]) -> tuple[str, Tensor, Tensor]:
    capture = Capture(model, layers, 4)
    start = torch.arange(3.0)[:, None].expand(3, 5).clone()
    # One token of three is padding.
    assert isinstance(model(start), Tensor), "the model returns what it always did"
    return (capture.method, *capture.take(2))


@pytest.mark.parametrize("way", ["tensor", "pair", "none"])
def test_hooks_read_what_enters_a_layer_whatever_it_returns(way: str) -> None:
    method, aux, final = captured(Model(way), [0, 2, 3])
    assert (method, aux.shape, final.shape) == ("hooks", (2, 3, 5), (2, 5))
    # Token t starts at t; then 1 + 2, + 3 and + 4 come to it.
    assert aux[..., 0].tolist() == [[0, 3, 6], [1, 4, 7]]
    assert final[:, 0].tolist() == [20, 22]


def test_the_native_interface_gives_the_same(native: Callable[..., nn.Module]) -> None:
    method, aux, final = captured(native(), [2, 3])
    assert (method, aux[..., 0].tolist(), final[:, 0].tolist()) == ("native", [[3, 6], [4, 7]], [20, 22])


def test_layer_zero_and_an_inner_model_without_the_interface_are_left_to_hooks(
    native: Callable[..., nn.Module],
) -> None:
    """vLLM's wrappers have the interface, whatever language model their checkpoint puts inside."""
    assert captured(native(), [0, 2])[:2][0] == "hooks"
    method, aux, _ = captured(native(Model()), [1, 2])
    assert (method, aux[..., 0].tolist()) == ("hooks", [[1, 3], [2, 4]])


def test_every_step_has_states_of_its_own() -> None:
    model = Model()
    capture = Capture(model, [1], 4)
    for start in (1.0, 5.0):
        model(torch.full((2, 3), start))
        assert capture.take(2)[0].unique().tolist() == [start + 1]
    # A step whose states nobody took, as vLLM's dummy runs are.
    for start in (2.0, 3.0):
        model(torch.full((2, 3), start))
    assert capture.take(2)[0].unique().tolist() == [4]
    with pytest.raises(RuntimeError, match="Model ran a step without its forward being called"):
        capture.take(2)


def test_layers_that_are_run_without_being_called_are_told() -> None:
    with pytest.raises(Unreadable, match=r"layers \[1, 3\], Model gave 1 by hooks; .*engine\.enforce_eager"):
        captured(Model(aside=1), [1, 3])


def test_a_layer_that_is_called_twice_is_told() -> None:
    model = Model()
    model.twice = True
    with pytest.raises(Unreadable, match=r"^layer 1, a Block, is called twice in one forward"):
        captured(model, [1])


def test_an_interface_that_gives_nothing_is_told(native: Callable[..., nn.Module]) -> None:
    model = native()
    capture = Capture(model, [2, 3], 4)
    model.model.aux_hidden_state_layers = ()  # as in a graph that was compiled before
    with pytest.raises(Unreadable, match=r"layers \[2, 3\], Native gave 0 by native"):
        model(torch.ones(2, 3))
    assert capture.method == "native"


@pytest.mark.parametrize(
    ("state", "final", "layer"),
    [
        ((4, 2, 3), (4, 3), "1"),
        ((4, 2, 3), (4, 2, 3), "1"),
        ((4, 6), (4, 3), "1"),
        ((2, 3), (4, 3), "1"),
        ((4, 3), (2, 3), "final"),
        ((4, 3), None, "1"),
    ],
)
def test_states_of_another_shape_than_tokens_and_width_are_told(
    state: tuple[int, ...], final: tuple[int, ...] | None, layer: str
) -> None:
    """Several streams side by side, tokens dealt out over ranks, and what a pipeline's stage hands on."""

    class Odd(Model):
        def forward(self, hidden: Tensor) -> Any:
            super().forward(torch.ones(state))
            return torch.ones(final) if final else {"hidden_states": hidden}

    model = Odd("tensor")
    capture = Capture(model, [1], 4)
    model(torch.ones(4, 3))
    with pytest.raises(
        Unreadable, match=rf"^Odd: the state of layer {layer} is a Tensor of \[.*\] by hooks, for 4 tokens and"
    ):
        capture.take(4)


def test_the_language_models_layers_are_found_beside_a_vision_tower() -> None:
    model = nn.Module()
    model.vision_tower = nn.Module()
    model.vision_tower.layers = nn.ModuleList([Llama() for _ in range(4)])
    model.language_model = nn.Module()
    model.language_model.model = nn.Module()
    model.language_model.model.layers = nn.ModuleList([DeepSeek() for _ in range(4)])
    assert decoder_layers(model, 4) is model.language_model.model.layers


class Wrapper(nn.Module):
    """A tower whose name tells nothing, nearer to the surface than the language model's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.eye = nn.Module()
        self.eye.layers = nn.ModuleList([Llama() for _ in range(4)])
        self.text = nn.Module()
        self.text.model = nn.Module()
        self.text.model.layers = nn.ModuleList([DeepSeek() for _ in range(4)])

    def get_language_model(self) -> nn.Module:
        found: nn.Module = self.text
        return found


def test_a_model_that_names_its_language_model_is_believed() -> None:
    model = Wrapper()
    assert decoder_layers(model, 4) is model.text.model.layers


def test_the_outermost_list_is_the_models() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([Llama(), Llama()])
    model.layers[0].blocks = nn.ModuleList([Granite(), Granite()])
    assert decoder_layers(model, 2) is model.layers


@pytest.mark.parametrize("name", ["stack", "layers"])
def test_a_model_without_such_a_list_is_told(name: str) -> None:
    model = nn.Module()
    setattr(model, name, nn.ModuleList([Llama()]))
    with pytest.raises(Unreadable, match=rf"has no lists of 4 decoder layers \(its lists: \{{'{name}': 1\}}\)"):
        decoder_layers(model, 4)


def test_two_lists_that_fit_are_told() -> None:
    model = nn.Module()
    model.layers, model.blocks = nn.ModuleList([Llama()]), nn.ModuleList([Llama()])
    with pytest.raises(Unreadable, match="has 2 lists of 1 decoder layers"):
        decoder_layers(model, 1)


def test_layers_on_several_pipeline_stages_are_told() -> None:
    class PPMissingLayer(nn.Identity):
        pass

    model = nn.Module()
    model.layers = nn.ModuleList([PPMissingLayer(), Llama()])
    with pytest.raises(
        Unreadable, match=r"layers is spread over pipeline stages; set engine\.args\.pipeline_parallel_size"
    ):
        decoder_layers(model, 2)
