"""States as vLLM's own connector gives them, to compare ours with: ``connector_states.py SPEC.json STATES.safetensors``.

SPEC.json holds config, target (as target.json), layers, rows of token ids, and may hold more keys of ``kv_transfer_config``. The
result has a tensor [L, A, H] for each row, named after its place. A process of its own, as vLLM's engine should have one.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from draftsmith import engine
from draftsmith.config import parse


def main(spec: dict[str, Any], states: Path) -> None:
    config, rows = parse(spec["config"], "test"), spec["rows"]
    engine.prepare_environment(config)
    # In this process the last files would never be written.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import load_hidden_states

    arguments = engine.vllm_arguments(config, spec["target"], max(map(len, rows)) + 4)
    llm = LLM(
        **arguments | {"enable_prefix_caching": False},
        speculative_config={
            "method": "extract_hidden_states", "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": spec["layers"]}},
        },
        kv_transfer_config={
            "kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(states.with_suffix(""))},
        } | spec.get("connector", {}),
    )  # fmt: skip
    greedy = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    answers = llm.generate([TokensPrompt(prompt_token_ids=row) for row in rows], greedy, use_tqdm=False)
    found = {}
    for place, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        saved = load_hidden_states(answer.kv_transfer_params["hidden_states_path"])
        assert saved["token_ids"].tolist() == row
        found[str(place)] = saved["hidden_states"].contiguous()
    save_file(found, states)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
