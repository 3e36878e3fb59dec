"""export_draft: write the trained draft in the form that a server loads, and check it tensor by tensor.

The form is that of vllm-project/speculators, because vLLM takes it both ways: as ``speculative_config.model`` beside a target,
and by itself, ``vllm serve FOLDER``, when it reads the target's name from the file. All norm flags are written out, since
vLLM's defaults for absent ones differ between its two formats.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.config import Config
from draftsmith.errors import DraftsmithError
from draftsmith.files import atomic_path, read_json, write_json
from draftsmith.log import log

if TYPE_CHECKING:
    from torch import Tensor

    from draftsmith.draft.config import DraftShape


def run(
    config: Config, *, target: Path, draft: Path, vocabulary: Path, train_report: Path, folder: Path, report: Path
) -> None:
    """Write config.json, model.safetensors and README.md into ``folder``, and the checks that they passed to ``report``.

    Raises :class:`DraftsmithError` naming the first tensor or key that is not as a server needs it.
    """
    from safetensors import safe_open

    from draftsmith.draft.config import draft_shape
    from draftsmith.draft.initial import read_vocabulary

    described, trained = read_json(target), read_json(train_report)
    described["layers"] = trained["layers"]
    d2t = read_vocabulary(vocabulary)
    shape = draft_shape(described, config.train, len(d2t))
    with safe_open(draft, framework="pt") as file:
        made_by = (file.metadata() or {}).get("fingerprint")
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if made_by != trained["fingerprint"]:
        raise DraftsmithError(
            f"{draft} comes from the training {made_by} and {train_report} tells of {trained['fingerprint']}; run train_draft again"
        )
    checks = _export(config, described, shape, weights, d2t, folder)
    card = model_card(config, described, shape, trained, read_json(folder / "config.json"))
    with atomic_path(folder / "README.md") as temporary:
        temporary.write_text(card)
    size = (folder / "model.safetensors").stat().st_size
    write_json(
        report,
        {
            "folder": str(folder),
            "bytes": size,
            "fingerprint": trained["fingerprint"],
            "verifier": verifier(described),
            "checks": checks,
        },
    )
    log(f"exported to {folder} ({size / 1e6:.1f} MB, {len(checks)} checks passed); serve it with: vllm serve {folder}")


def untrained(config: Config, *, target: Path, layers: list[int], vocabulary: Path, folder: Path) -> None:
    """Export the draft that training starts from, of the same seed: what the trained one's acceptance is compared with.

    ``layers`` are the layer ids of the trained one.
    """
    from draftsmith.draft.config import draft_shape
    from draftsmith.draft.initial import initial_draft, read_vocabulary, target_head

    described = read_json(target) | {"layers": layers}
    d2t = read_vocabulary(vocabulary)
    shape = draft_shape(described, config.train, len(d2t))
    head = target_head(described, shape)
    # The server shares the target's embedding, so none is needed here.
    model = initial_draft(shape, head[:0], head, d2t, config.train.seed)
    _export(config, described, shape, model.state_dict(), d2t, folder)


def _export(
    config: Config, target: dict[str, Any], shape: DraftShape, weights: Mapping[str, Tensor], d2t: Tensor, folder: Path
) -> list[dict[str, str]]:
    """Write weights, then config.json, and check what was written."""
    from safetensors.torch import save_file

    from draftsmith.draft.teacher import target_ids

    dtype = _dtype(config, target)
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in weights.items()}
    # With the whole vocabulary vLLM has no mapping to load one into.
    if shape.draft_vocab < shape.target_vocab:
        tensors |= vocabulary_tensors(target_ids(d2t, shape.target_vocab), shape.target_vocab)
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder / "model.safetensors") as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    write_json(folder / "config.json", draft_config(config, target, shape, str(dtype).removeprefix("torch.")))
    return check(folder, target, shape)


def vocabulary_tensors(token_ids: Tensor, target_vocab: int) -> dict[str, Tensor]:
    """``d2t`` int64 [Vd], what to add to a draft id, and ``t2d`` bool [V], for target ids [Vd]."""
    import torch

    in_draft = torch.zeros(target_vocab, dtype=torch.bool)
    in_draft[token_ids] = True
    return {"d2t": token_ids - torch.arange(len(token_ids)), "t2d": in_draft}


def verifier(target: Mapping[str, Any]) -> str:
    """What a server finds the target by: its hub id, or the absolute path of its folder."""
    source = str(target["source"])
    local = source.startswith("package:") or Path(source).expanduser().exists() or target.get("revision") is None
    return str(Path(target["path"]).resolve()) if local else source


def draft_config(config: Config, target: Mapping[str, Any], shape: DraftShape, dtype: str) -> dict[str, Any]:
    """The content of config.json."""
    layer = {
        "model_type": "llama",
        "vocab_size": shape.target_vocab,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": shape.max_positions,
        "rope_parameters": shape.rope,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        # Without it vLLM takes fc to be three layers wide, whatever the list of layers says.
        "num_aux_hidden_states": len(shape.layers),
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": config.export.speculative_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": verifier(target), "architectures": target["architectures"]},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": shape.draft_vocab,
        "eagle_aux_hidden_state_layer_ids": list(shape.layers),
        "norm_before_residual": shape.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": shape.fc_norm,
        "norm_output": shape.norm_output,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }


def expected_tensors(shape: DraftShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight that vLLM's Eagle3LlamaForCausalLM loads for a draft of this shape.

    Written out rather than taken from the model, which it is there to check.
    """
    hidden, both = shape.hidden_size, 2 * shape.hidden_size
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    tensors: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(shape.layers) * hidden),
        "layers.0.input_layernorm.weight": (hidden,),
        "layers.0.hidden_norm.weight": (hidden,),
        "layers.0.post_attention_layernorm.weight": (hidden,),
        "layers.0.self_attn.q_proj.weight": (queries, both),
        "layers.0.self_attn.k_proj.weight": (keys, both),
        "layers.0.self_attn.v_proj.weight": (keys, both),
        "layers.0.self_attn.o_proj.weight": (hidden, queries),
        "layers.0.mlp.gate_proj.weight": (shape.intermediate_size, hidden),
        "layers.0.mlp.up_proj.weight": (shape.intermediate_size, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, shape.intermediate_size),
        "norm.weight": (hidden,),
        "lm_head.weight": (shape.draft_vocab, hidden),
    }
    if shape.fc_norm:
        tensors |= {f"fc_norm.{number}.weight": (hidden,) for number in range(len(shape.layers))}
    if shape.draft_vocab < shape.target_vocab:
        tensors |= {"d2t": (shape.draft_vocab,), "t2d": (shape.target_vocab,)}
    return tensors


def check(folder: Path, target: Mapping[str, Any], shape: DraftShape) -> list[dict[str, str]]:
    """Read the export back and check it; returns name, status and detail of each check.

    Raises :class:`DraftsmithError` at the first that fails.
    """
    from safetensors import safe_open

    settings = read_json(folder / "config.json")
    file = folder / "model.safetensors"
    with safe_open(file, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    checks: list[tuple[str, Callable[[], str]]] = [
        ("tensor names", lambda: _check_names(file, tensors, shape)),
        ("tensor shapes", lambda: _check_shapes(file, tensors, shape)),
        ("tensor dtypes", lambda: _check_dtypes(file, tensors, settings["dtype"])),
        ("finite, not all zero", lambda: _check_values(file, tensors)),
        ("vocabulary mapping", lambda: _check_mapping(file, tensors, shape)),
        ("captured layers", lambda: _check_layers(folder, settings, target)),
        ("sizes of the target", lambda: _check_sizes(folder, settings, target)),
    ]
    return [{"name": name, "status": "ok", "detail": test()} for name, test in checks]


def _check_names(file: Path, tensors: Mapping[str, Tensor], shape: DraftShape) -> str:
    expected = set(expected_tensors(shape))
    missing, surplus = sorted(expected - set(tensors)), sorted(set(tensors) - expected)
    if missing or surplus:
        raise DraftsmithError(
            f"{file}: lacks tensors {missing} and has {surplus} that no server loads; run train_draft again"
        )
    return f"{len(expected)} tensors, lm_head among them, no embedding (the server shares the target's)"


def _check_shapes(file: Path, tensors: Mapping[str, Tensor], shape: DraftShape) -> str:
    for name, expected in expected_tensors(shape).items():
        if tuple(tensors[name].shape) != expected:
            raise DraftsmithError(
                f"{file}: {name} is {list(tensors[name].shape)} and must be {list(expected)}; run train_draft again"
            )
    return f"fc takes {len(shape.layers)} x {shape.hidden_size}, lm_head gives {shape.draft_vocab}"


def _check_dtypes(file: Path, tensors: Mapping[str, Tensor], dtype: str) -> str:
    import torch

    for name, tensor in tensors.items():
        expected = {"d2t": torch.int64, "t2d": torch.bool}.get(name, getattr(torch, dtype))
        if tensor.dtype != expected:
            raise DraftsmithError(f"{file}: {name} is {tensor.dtype} and must be {expected}; run export_draft again")
    return dtype


def _check_values(file: Path, tensors: Mapping[str, Tensor]) -> str:
    import torch

    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            continue
        if not bool(torch.isfinite(tensor).all()):
            raise DraftsmithError(
                f"{file}: {name} has values that are not finite; lower train.learning_rate and train again"
            )
        if not bool(tensor.any()):
            raise DraftsmithError(f"{file}: {name} is all zero; train again")
    return f"{sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point()):,} weights"


def _check_mapping(file: Path, tensors: Mapping[str, Tensor], shape: DraftShape) -> str:
    from draftsmith.draft.teacher import target_ids

    if "d2t" not in tensors:
        return "none: the draft has the target's whole vocabulary"
    ids = target_ids(tensors["d2t"], shape.target_vocab)
    if tensors["t2d"].nonzero().squeeze(1).tolist() != ids.tolist():
        raise DraftsmithError(f"{file}: t2d and d2t name different tokens; run map_vocabulary again")
    return f"{shape.draft_vocab} of {shape.target_vocab} tokens, ids {int(ids[0])} to {int(ids[-1])}"


def _check_layers(folder: Path, settings: Mapping[str, Any], target: Mapping[str, Any]) -> str:
    layers = settings["eagle_aux_hidden_state_layer_ids"]
    if layers != sorted(set(layers)) or not layers or layers[0] < 0 or layers[-1] >= target["num_layers"]:
        raise DraftsmithError(
            f"{folder / 'config.json'}: layers {layers} must be distinct, ascending and below {target['num_layers']}; "
            "correct target.layers"
        )
    if settings["transformer_layer_config"]["num_aux_hidden_states"] != len(layers):
        raise DraftsmithError(f"{folder / 'config.json'}: num_aux_hidden_states does not count the layers {layers}")
    return f"{layers} of {target['num_layers']}"


def _check_sizes(folder: Path, settings: Mapping[str, Any], target: Mapping[str, Any]) -> str:
    layer = settings["transformer_layer_config"]
    for key in ("hidden_size", "vocab_size"):
        if layer[key] != target[key]:
            raise DraftsmithError(f"{folder / 'config.json'}: {key} is {layer[key]}, the target's is {target[key]}")
    longest = target.get("max_positions")
    if longest and layer["max_position_embeddings"] < longest:
        raise DraftsmithError(
            f"{folder / 'config.json'}: {layer['max_position_embeddings']} positions are fewer than the target's {longest}"
        )
    return f"width {layer['hidden_size']}, {layer['max_position_embeddings']} positions, rope {json.dumps(layer['rope_parameters'])}"


def _dtype(config: Config, target: Mapping[str, Any]) -> Any:
    import torch

    asked = config.export.dtype if config.export.dtype != "auto" else str(target.get("torch_dtype") or "bfloat16")
    # Quantised checkpoints may name an integer or an 8-bit float here.
    return getattr(torch, asked) if asked in ("bfloat16", "float16", "float32") else torch.bfloat16


def model_card(
    config: Config,
    target: Mapping[str, Any],
    shape: DraftShape,
    trained: Mapping[str, Any],
    exported: Mapping[str, Any],
) -> str:
    """README.md of the export: what it is, how to serve it, how it was made, how good it is in simulation."""
    name = verifier(target)
    hub = {} if name.startswith("/") else {"base_model": name}
    head = "\n".join(
        ["---", *(f"{key}: {value}" for key, value in hub.items()), "tags: [speculative-decoding, eagle3]", "---"]
    )
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    rows = [
        ("target", f"`{target['source']}`" + (f" at `{target['revision']}`" if target.get("revision") else "")),
        ("target's fingerprint", f"`{target['fingerprint']}`"),
        ("training's fingerprint", f"`{trained['fingerprint']}`"),
        ("captured layers (input of)", ", ".join(map(str, shape.layers)) + f" of {target['num_layers']}"),
        ("draft vocabulary", f"{shape.draft_vocab:,} of {shape.target_vocab:,} tokens"),
        ("trained weights", f"{trained['params']:,} ({exported['dtype']} here)"),
        ("flags", ", ".join(f"{flag}: {str(exported[flag]).lower()}" for flag in flags)),
        ("training", f"{trained['steps']:,} steps, {trained['epochs']:g} epochs, {trained['tokens']:,} tokens in rows"),
        ("TTT steps, decay", f"{config.train.ttt_steps}, {config.train.step_decay:g}"),
        ("learning rate, seed", f"{config.train.learning_rate:g}, {config.train.seed}"),
    ]
    if trained["simulated_acceptance_length"] is not None:
        shares = " / ".join(f"{share:.1%}" for share in trained["acceptance"])
        rows += [
            (
                "simulated acceptance length",
                f"{trained['simulated_acceptance_length']:.3f} on validation rows, {config.train.ttt_steps} tokens drafted",
            ),
            ("simulated acceptance by position", shares),
        ]
    table = "\n".join(["| | |", "| --- | --- |", *(f"| {label} | {value} |" for label, value in rows)])
    count = config.export.speculative_tokens
    beside = json.dumps({"method": "eagle3", "model": "THIS FOLDER", "num_speculative_tokens": count})
    return f"""{head}
# EAGLE-3 draft for {target["source"]}

A one-layer draft model for speculative decoding. It proposes tokens, the target checks them; greedy output stays that of the
target. It is of no use without the target, whose embedding and hidden states it takes.

    vllm serve THIS_FOLDER                                   # {count} tokens drafted; loads {name}
    vllm serve {name} --speculative-config '{beside}'

{table}

The simulated figures are greedy acceptance along stored answers, a target token outside the draft vocabulary counting as
rejected; a server's own figures are what counts. Made with Draftsmith.
"""
