"""What the settings of extract.storage cost: bytes, and the error of the states and of what the target says by them.

    python benchmarks/storage.py store --target results/demo/target.json

Reads rows, drawn at random, of any store whose states are not float8 yet, of any format version, and writes nothing. The error
of a state is relative, |stored - state| / |state| over its numbers, one a token; the target's words are softmax(lm_head(final)),
compared by Kullback-Leibler divergence in nats, by the share of probability that moves, and by the likeliest token. A table,
and last a line of JSON.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors import safe_open
from torch import Tensor

from draftsmith import store
from draftsmith.errors import DraftsmithError
from draftsmith.files import read_json
from draftsmith.store.inventory import folders
from draftsmith.target_weights import head_weight

# Operations of all heads: some twenty seconds of two CPU cores.
_HEAD_OPERATIONS = 4e11
_FILES = 64


def main(
    folder: Annotated[Path, typer.Argument(help="The store, or the folder of one fingerprint.")] = Path("store"),
    target: Annotated[Path, typer.Option(help="target.json, whose checkpoint has the head.")] = Path(
        "results/demo/target.json"
    ),
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that are looked at.")] = 16384,
    seed: Annotated[int, typer.Option(help="Which rows are drawn.")] = 0,
) -> None:
    """Measure and print."""
    begun = time.perf_counter()
    found = folders(folder)
    if len(found) > 1:
        raise DraftsmithError(
            f"{folder}: holds {len(found)} fingerprints; name the folder of one of them, as {found[0]}"
        )
    header, aux, final = sample(found[0], tokens, random.Random(seed))
    described = read_json(target)
    if described["fingerprint"] != header["target"]:
        raise DraftsmithError(
            f"{target}: is another target than that of {found[0]}; give its own target.json as --target"
        )
    head = head_weight(Path(described["path"])).float()
    torch.manual_seed(seed)
    said = torch.randperm(len(final))[: max(64, int(_HEAD_OPERATIONS / (6 * head.numel())))]
    result: dict[str, Any] = {
        "store": str(found[0]), "dtype": header["dtype"], "layers": header["layers"], "hidden_size": header["hidden_size"],
        "tokens": len(final), "tokens_by_head": len(said), "peak": peaks(aux, final, header["layers"]), "storage": {},
    }  # fmt: skip
    for storage in ("target", "bf16", "fp8"):
        each = store.bytes_per_token(len(header["layers"]), header["hidden_size"], header["dtype"], storage)
        result["storage"][storage] = {"bytes_per_token": each}
        if storage != "target":
            states = {f"layer {layer}": aux[:, place] for place, layer in enumerate(header["layers"])} | {
                "final": final
            }
            errors = {name: error(state, through(state, storage)) for name, state in states.items()}
            result["storage"][storage] |= {"error": errors} | words(head, final[said], through(final[said], storage))
    result["seconds"] = round(time.perf_counter() - begun, 1)
    show(result)
    print(json.dumps(result))


def sample(folder: Path, tokens: int, source: random.Random) -> tuple[dict[str, Any], Tensor, Tensor]:
    """Header of a file, and the states aux [T, A, H] and final [T, H] of whole rows, ``tokens`` or a few more in all."""
    paths = sorted(folder.glob(f"*{store.SUFFIX}"))
    if not paths:
        raise DraftsmithError(f"{folder}: holds no batch file")
    rows: list[tuple[Path, int, int]] = []
    header: dict[str, Any] = {}
    for path in source.sample(paths, min(_FILES, len(paths))):
        with safe_open(path, "pt") as file:
            header, at = json.loads(file.metadata()["draftsmith"]), 0
        for length in header["lengths"]:
            rows.append((path, at, at + length))
            at += length
    if header.get("storage") == "fp8":
        raise DraftsmithError(f"{folder}: its states are float8 already; measure where they are whole")
    source.shuffle(rows)
    aux, final, count = [], [], 0
    for path, start, end in rows:
        if count >= tokens:
            break
        with safe_open(path, "pt") as file:
            aux.append(file.get_slice("aux")[start:end])
            final.append(file.get_slice("final")[start:end])
        count += end - start
    return header, torch.cat(aux), torch.cat(final)


def through(states: Tensor, storage: str) -> Tensor:
    """States as they come back from the store."""
    if storage == "bf16":
        return states.to(torch.bfloat16)
    return store.dequantise(*store.quantise(states), states.dtype)


def error(states: Tensor, back: Tensor) -> dict[str, float]:
    """Relative error of each token's state: mean and largest."""
    each = (back.float() - states.float()).norm(dim=-1) / states.float().norm(dim=-1)
    return {"mean": round(float(each.mean()), 6), "max": round(float(each.max()), 6)}


def peaks(aux: Tensor, final: Tensor, layers: list[int]) -> dict[str, float]:
    """How far the largest number of a state stands out: max|x| / rms(x), the median of the tokens and the largest."""
    made = {}
    for name, states in [*((f"layer {layer}", aux[:, place]) for place, layer in enumerate(layers)), ("final", final)]:
        ratio = states.float().abs().amax(-1) / states.float().pow(2).mean(-1).sqrt()
        made |= {name: round(float(ratio.median()), 1), f"{name}, largest": round(float(ratio.max()), 1)}
    return made


def words(head: Tensor, final: Tensor, back: Tensor) -> dict[str, float]:
    """What becomes of the target's distribution over its vocabulary."""
    divergence, moved, same = [], [], 0
    for one, other in zip(final.float().split(128), back.float().split(128), strict=True):
        p, q = (torch.log_softmax((states @ head.T).double(), -1) for states in (one, other))
        divergence.append((p.exp() * (p - q)).sum(-1))
        moved.append((p.exp() - q.exp()).abs().sum(-1) / 2)
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
    every = torch.cat(divergence)
    return {
        "kl_mean": float(f"{every.mean():.3g}"), "kl_max": float(f"{every.max():.3g}"),
        "moved": float(f"{torch.cat(moved).mean():.3g}"), "same_token": round(same / len(final), 4),
    }  # fmt: skip


def show(result: dict[str, Any]) -> None:
    """The table."""
    names = [*(f"layer {layer}" for layer in result["layers"]), "final"]
    print(
        f"{result['store']}: {result['dtype']} states of {result['tokens']} tokens; by the head {result['tokens_by_head']}"
    )
    print(
        f"{'storage':8} {'B/token':>8} "
        + " ".join(f"{name:>9}" for name in names)
        + f" {'KL':>9} {'KL max':>9} {'moved':>9} {'same':>7}"
    )
    for storage, each in result["storage"].items():
        line = f"{storage:8} {each['bytes_per_token']:>8,} "
        if "error" in each:
            line += " ".join(f"{each['error'][name]['mean']:>9.2%}" for name in names)
            line += f" {each['kl_mean']:>9.2g} {each['kl_max']:>9.2g} {each['moved']:>9.2%} {each['same_token']:>7.1%}"
        print(line.rstrip())


if __name__ == "__main__":
    try:
        typer.run(main)
    except DraftsmithError as fault:
        sys.exit(f"error: {fault}")
