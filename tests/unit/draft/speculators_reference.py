"""What vllm-project/speculators 0.9 computes on fixed tensors: its EAGLE-3 model, its eager loss, its gradients.

    pip install --no-deps --target FOLDER speculators==0.9.0 hs-connectors==0.9.0
    PYTHONPATH=FOLDER python tests/unit/draft/speculators_reference.py

writes speculators_reference.json beside this file, which test_against_speculators.py compares with; the tests need no
speculators. Weights and rows come from the generators below.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FIGURES = Path(__file__).with_suffix(".json")
LENGTH, STEPS, DECAY = 12, 3, 0.8
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 40,
}
DRAFT_VOCAB = 12


def row() -> dict[str, Tensor]:
    """A row of twelve tokens: ids int64 [L], aux [L, 3, H], last [L, H] before the target's final norm."""
    random = torch.Generator().manual_seed(11)
    width = SIZES["hidden_size"]
    return {
        "ids": torch.randint(SIZES["vocab_size"], (LENGTH,), generator=random),
        "aux": torch.randn(LENGTH, 3, width, generator=random),
        "last": torch.randn(LENGTH, width, generator=random) * 2,
    }


def target() -> dict[str, Tensor]:
    """The target's embedding and head [V, H], final norm [H], and the target ids [Vd] of the draft vocabulary."""
    random = torch.Generator().manual_seed(12)
    vocab, width = SIZES["vocab_size"], SIZES["hidden_size"]
    return {
        "embedding": torch.randn(vocab, width, generator=random),
        "head": torch.randn(vocab, width, generator=random),
        "norm": 1 + 0.3 * torch.randn(width, generator=random),
        "kept": torch.randperm(vocab, generator=random)[:DRAFT_VOCAB].sort().values,
    }


def weights(names: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Random weights of these shapes, norms around 1; the same for a name whatever else there is."""
    made = {}
    for name, shape in names.items():
        random = torch.Generator().manual_seed(sum(map(ord, name)))
        noise = torch.randn(shape, generator=random)
        made[name] = 1 + 0.3 * noise if "norm" in name else 0.3 * noise
    return made


def main() -> None:
    """Run speculators and write its figures."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    layer = LlamaConfig(
        **SIZES, num_hidden_layers=1, rms_norm_eps=1e-6, max_position_embeddings=128, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    layer._attn_implementation = "eager"
    figures: dict[str, Any] = {"speculators": "0.9.0"}
    for name, flags in {"default": {}, "3.1": {"fc_norm": True, "norm_output": True}}.items():
        config = Eagle3SpeculatorConfig(
            transformer_layer_config=layer, draft_vocab_size=DRAFT_VOCAB, norm_before_residual=True, norm_before_fc=False,
            eagle_aux_hidden_state_layer_ids=[1, 2, 3], **flags,
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3", proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
                default_proposal_method="greedy", verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
            ),
        )  # fmt: skip
        model = Eagle3DraftModel(config).float()
        given, ours = target(), row()
        trained = [each for each in dict(model.named_parameters()) if not each.startswith(("embed", "verifier"))]
        shapes = {each: tuple(tensor.shape) for each, tensor in model.named_parameters() if each in trained}
        with torch.no_grad():
            for each, tensor in weights(shapes).items():
                model.get_parameter(each).copy_(tensor)
            model.embed_tokens.weight.copy_(given["embedding"])
            model.verifier_lm_head.weight.copy_(given["head"][given["kept"]])
            model.verifier_norm.weight.copy_(given["norm"])
        model.lm_head.weight.requires_grad_(True)
        # Token L-1 is left out of the mask, as nobody asks what follows the end of an answer.
        mask = torch.ones(1, LENGTH - 1)
        mask[0, -1] = 0
        _, loss, metrics = model(
            hidden_states=ours["aux"].flatten(1)[None, :-1], input_ids=ours["ids"][None, 1:],
            document_ids=torch.zeros(1, LENGTH - 1, dtype=torch.long), loss_mask=mask,
            position_ids=torch.arange(1, LENGTH)[None], verifier_last_hidden_states=ours["last"][None, 1:],
            ttt_steps=STEPS, ttt_step_loss_decay=DECAY, loss_config=resolve_loss_config("kl_div", "eager"),
        )  # fmt: skip
        loss.backward()
        figures[name] = {
            "loss": loss.item(),
            "steps": [metrics[f"loss_{step}_sum"].item() for step in range(STEPS)],
            "gradients": {
                each: {"norm": gradient.norm().item(), "first": gradient.flatten()[:4].tolist()}
                for each in trained
                if (gradient := model.get_parameter(each).grad) is not None
            },
        }
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
