"""What vLLM drafts with an exported draft: token by token what a plain run of its two files gives: whole, with a window, with latent attention."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tiny
from draftsmith import engine, export_draft, vllm_compat
from draftsmith.draft.config import draft_shape
from draftsmith.draft.initial import initial_draft
from extraction import rows_of, settings
from plain_server import PlainServer, of_export

K = 4
# The first is longer than five blocks of 32 positions, of which a window lets go; a plain run of it takes long.
PROMPTS = rows_of([180, 21, 5, 33], seed=30)


def exported(folder: Path, model_type: str, train: dict[str, Any]) -> tuple[Path, Tensor, dict[str, Any]]:
    """The folder of a draft of random weights, the target's embedding, and target.json."""
    name, _, plain = model_type.partition(", ")
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}} if plain else {}
    model = tiny.model(folder / "model", name, **rope)
    target = tiny.target(model)
    config = settings(folder, train=train, export={"dtype": "float32"})
    random = torch.Generator().manual_seed(3)
    d2t = torch.randperm(320, generator=random)[:200].sort().values - torch.arange(200)
    weights = load_file(model / "model.safetensors")
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    draft = initial_draft(draft_shape(target | {"layers": [1, 3, 5]}, config.train, 200), embedding, head, d2t, seed=0)
    for name, tensor in draft.state_dict().items():
        noise = torch.randn(tensor.shape, generator=random)
        tensor.copy_(1 + 0.3 * noise if "norm" in name else 0.3 * noise)
    save_file({"d2t": d2t}, folder / "vocabulary.safetensors")
    save_file(draft.state_dict(), folder / "draft.safetensors", metadata={"fingerprint": "0"})
    report = {
        "fingerprint": "0", "layers": [1, 3, 5], "params": 1, "steps": 1, "epochs": 1, "tokens": 1, "acceptance": [],
        "simulated_acceptance_length": None,
    }  # fmt: skip
    (folder / "train.json").write_text(json.dumps(report))
    (folder / "target.json").write_text(json.dumps(target))
    export_draft.run(
        config, target=folder / "target.json", draft=folder / "draft.safetensors", vocabulary=folder / "vocabulary.safetensors",
        train_report=folder / "train.json", folder=folder / "draft", report=folder / "draft" / "export.json",
    )  # fmt: skip
    return folder / "draft", embedding, target


class Record:
    """What vLLM's proposer is given and gives, for one request at a time."""

    def __init__(self) -> None:
        self.states: dict[int, Tensor] = {}
        """The target's states of each position, [layers x H]."""
        self.proposals: list[tuple[int, list[int]]] = []
        """The last position that the target has read, and the tokens drafted behind the one that follows."""

    def taken(self) -> tuple[dict[int, Tensor], list[tuple[int, list[int]]]]:
        """States and proposals of one request, which are then forgotten."""
        taken = self.states, self.proposals
        self.states, self.proposals = {}, []
        return taken

    def wrap(self, propose: Any) -> Any:
        signature = inspect.signature(propose)

        def recorded(*args: Any, **keywords: Any) -> Any:
            given = signature.bind(*args, **keywords).arguments
            positions, states = given["target_positions"].tolist(), given["target_hidden_states"].clone()
            last = given["token_indices_to_sample"]
            last = len(positions) - 1 if last is None else int(last[0])
            # What lies behind are tokens that the target has refused.
            self.states |= dict(zip(positions[: last + 1], states, strict=False))
            drafted = propose(*args, **keywords)
            self.proposals.append((positions[last], drafted[0].tolist()))
            return drafted

        return recorded


def rolled_out(server: PlainServer, ids: Tensor, tokens: list[int], states: dict[int, Tensor], last: int) -> list[int]:
    """K tokens drafted by ``server``, greedily, once it has taken the target's states of the positions up to ``last``."""
    for place in range(last + 1):
        out, hidden = server.step(tokens[place + 1], server.combine(states[place].view(3, -1)), place)
    drafted = [int(ids[out.argmax()])]
    for place in range(last + 1, last + K):
        out, hidden = server.step(drafted[-1], hidden, place)
        drafted.append(int(ids[out.argmax()]))
    return drafted


@pytest.mark.parametrize(
    ("model_type", "train", "args"),
    [
        ("llama", {}, {"block_size": 32}),
        ("llama", {"attention_window": 6}, {"block_size": 32}),
        ("deepseek_v3", {"architecture": "mla"}, {}),
        ("deepseek_v3, plain rope", {"architecture": "mla", "norm_output": True, "fc_norm": True}, {}),
    ],
    ids=["whole", "window", "latent", "latent, plain rope and switches"],
)
def test_vllm_drafts_what_a_plain_run_drafts(
    model_type: str, train: dict[str, Any], args: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, embedding, target = exported(tmp_path, model_type, train)
    window = train.get("attention_window")
    prompts = PROMPTS[:3] if model_type == "llama" else PROMPTS[1:]
    # Prompts are read whole: what is asked here is the draft, not how a prompt is cut.
    config = settings(tmp_path, engine={"args": args, "max_num_seqs": 1, "max_num_batched_tokens": 256})
    engine.prepare_environment(config)
    vllm_compat.model_class(list(target["architectures"]))
    vllm_compat.mend()
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    record = Record()
    monkeypatch.setattr(SpecDecodeBaseProposer, "propose", record.wrap(SpecDecodeBaseProposer.propose))
    served = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": K}
    llm = LLM(**engine.vllm_arguments(config, target, 256), speculative_config=served)
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    answered = []
    try:
        for prompt in prompts:
            answer = llm.generate([TokensPrompt(prompt_token_ids=prompt)], greedy, use_tqdm=False)[0].outputs[0]
            answered.append((prompt, prompt + list(answer.token_ids), record.taken()))
    finally:
        llm.llm_engine.engine_core.shutdown()
    checked = far = 0
    for prompt, tokens, (states, proposals) in answered:
        for last, drafted in proposals:
            if not len(prompt) <= last + 1 < len(tokens):
                # A part of the prompt, whose draft nobody takes, or behind the answer's last token.
                continue
            server, ids = of_export(draft, embedding)
            assert drafted == rolled_out(server, ids, tokens, states, last), (len(prompt), last)
            whole, ids = of_export(draft, embedding)
            whole.shape.attention_window = None
            far += window is not None and drafted != rolled_out(whole, ids, tokens, states, last)
            checked += 1
    assert checked > 40
    # A server that forgets the window would draft other tokens.
    assert far > 20 or window is None
