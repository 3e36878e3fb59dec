"""vllm-project/speculators 0.9 on this project's stored states: its EAGLE-3 model, its batches and its loss.

What the benchmarks that train it share. Its package must be importable; nothing of it is imported before it is called.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftsmith.draft.config import DraftShape, window_keys
from draftsmith.draft.teacher import target_ids


def model(
    shape: DraftShape,
    embedding: Tensor,
    head: Tensor,
    d2t: Tensor,
    *,
    seed: int,
    tokens: int,
    verifier: str | None = None,
    architectures: list[str] | None = None,
) -> Any:
    """Its Eagle3DraftModel of ``shape`` with float32 weights, on the CPU; embedding and head are the target's, and frozen.

    ``tokens`` is the draft length in its config, ``verifier`` the target's name there. Attention is flex on a GPU, as by
    default, and eager on a CPU.
    """
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer = shape.llama()
    layer._attn_implementation = "simple_flex_attention" if torch.cuda.is_available() else "eager"
    # By these vLLM knows how wide fc is, and speculators which positions a query sees.
    layer.num_aux_hidden_states = len(shape.layers)
    for key, value in window_keys(shape.attention_window).items():
        setattr(layer, key, value)
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=shape.draft_vocab, norm_before_residual=shape.norm_before_residual,
        norm_before_fc=False, fc_norm=shape.fc_norm, norm_output=shape.norm_output, eagle_aux_hidden_state_layer_ids=list(shape.layers),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3", proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=tokens)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=verifier, architectures=architectures or ["LlamaForCausalLM"]),
        ),
    )  # fmt: skip
    torch.manual_seed(seed)
    made = Eagle3DraftModel(config).float()
    rows = head[target_ids(d2t, shape.target_vocab)]
    with torch.no_grad():
        made.embed_tokens.weight.copy_(embedding)
        made.lm_head.weight.copy_(rows)
        made.verifier_lm_head.weight.copy_(rows)
        made.verifier_norm.weight.fill_(1.0)
    return made


def loss_of(made: Any, batch: dict[str, Tensor], steps: int, decay: float, config: Any, dtype: torch.dtype) -> Tensor:
    """Its loss on a batch that :func:`batch_of` has made, under autocast unless ``dtype`` is float32."""
    device = made.lm_head.weight.device
    moved = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
    with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
        _, loss, _ = made(**moved, ttt_steps=steps, ttt_step_loss_decay=decay, loss_config=config)
    return loss  # type: ignore[no-any-return]


def loss_config() -> Any:
    """Its default loss for EAGLE-3: ``kl_div``, fused on a GPU, eager on a CPU."""
    from speculators.losses import resolve_loss_config

    if torch.cuda.is_available():
        from speculators.losses import fused

        # Both kernels have the same list of candidates, which torch.compile refuses to follow under two names.
        fused.loss_backward_kernel.configs = list(fused.loss_backward_kernel.configs)
    return resolve_loss_config("kl_div", "fused" if torch.cuda.is_available() else "eager")


def batch_of(rows: list[tuple[Any, Any]], size: int, dtype: torch.dtype | None = None) -> tuple[dict[str, Tensor], int]:
    """Rows as its collate function lays them out, shifted by one each and on a GPU padded to ``size``; and the rows' tokens.

    ``rows`` are pairs of a row and its states, which go into ``dtype`` where one is given. A row whose states end with its
    last supervised token is as long as they are.
    """
    parts: dict[str, list[Tensor]] = {}
    for number, (row, states) in enumerate(rows):
        length = len(states.token_ids)
        mask = torch.zeros(length)
        for start, end in zip(row.starts, row.ends, strict=True):
            mask[start:end] = 1
        for name, tensor in {
            "hidden_states": states.aux.flatten(1)[:-1].to(dtype or states.aux.dtype),
            "input_ids": states.token_ids[1:].long(),
            "verifier_last_hidden_states": states.final[1:].to(dtype or states.final.dtype),
            "loss_mask": mask[1:],
            "position_ids": torch.arange(1, length),
            "document_ids": torch.full((length - 1,), number),
        }.items():
            parts.setdefault(name, []).append(tensor)
    batch = {}
    for name, tensors in parts.items():
        joined = torch.cat(tensors)
        fill = -1 if name == "document_ids" else 0
        # Its eager attention, as a CPU needs it, makes no numbers of padding.
        missing = size - len(joined) if torch.cuda.is_available() else 0
        padding = joined.new_full((missing, *joined.shape[1:]), fill)
        whole = torch.cat([joined, padding])[None]
        batch[name] = whole.pin_memory() if torch.cuda.is_available() else whole
    return batch, sum(row.length for row, _ in rows)
