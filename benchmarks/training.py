"""Speed and memory of a training step, beside vllm-project/speculators' step on the same stored states, as ratios within one call.

    python benchmarks/training.py --quick
    python benchmarks/training.py --shape llama-3-8b --store /dev/shm/bench --ttt-steps 3,7 --speculators FOLDER

FOLDER is made by `pip install --no-deps --target FOLDER speculators==0.9.0 hs-connectors==0.9.0`; without it this project is
measured alone. Each way trains in a process of its own, with AdamW and a frozen head, for some optimiser steps that are not counted
(compilation is among them) and then for several windows of as many. Ours is the stage itself, from rows.parquet to draft; it
reads its packs from the store. Theirs is their model, loss and step with the packs ready in memory, so that it never waits
for data. One line of JSON for each way, and last the ratios.
"""

from __future__ import annotations

import sys

# The standard library first: this folder has a tokenize.py too.
sys.path.append(sys.path.pop(0))

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated, Any

import arguments
import shapes
import torch
import typer

from draftsmith import hardware, store
from draftsmith.files import write_json

HERE = Path(__file__).parent
WAYS = ("ours", "speculators", "ours-head")
SHAPES = ("llama-3-8b", "tiny")
# Share of a row that is its prompt.
PROMPT = 0.25


def main(
    shape: Annotated[str, typer.Option(help="llama-3-8b or tiny.")] = "",
    ways: Annotated[
        str, typer.Option(help="Which to run: ours, speculators, and ours-head, which also trains lm_head.")
    ] = "",
    ttt_steps: Annotated[
        str, typer.Option(help="As train.ttt_steps; several with commas between, on the same states.")
    ] = "3",
    pack_tokens: Annotated[int, typer.Option(min=0, help="As train.pack_tokens.")] = 0,
    packs: Annotated[int, typer.Option(min=1, help="Packs in the store.")] = 8,
    lengths: Annotated[str, typer.Option(help="Lengths of rows, taken in turn.")] = "",
    draft_vocab: Annotated[int, typer.Option(min=0, help="Tokens of the draft vocabulary.")] = 0,
    steps: Annotated[int, typer.Option(min=0, help="Optimiser steps of a window.")] = 0,
    windows: Annotated[int, typer.Option(min=1, help="Windows that count; one before them does not.")] = 3,
    folder: Annotated[
        Path,
        typer.Option(
            "--store", file_okay=False, help="Folder in which one for the states is made, and removed at the end."
        ),
    ] = Path("work/benchmarks/training"),
    speculators: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="Folder with speculators 0.9.")
    ] = None,
    train: Annotated[str, typer.Option(help="More keys of the config's section train, as JSON.")] = "{}",
    quick: Annotated[bool, typer.Option(help="A size that takes a minute on two CPU cores.")] = False,
    profile: Annotated[
        bool, typer.Option(help="Also write where the time of our way goes, beside its log; it slows it.")
    ] = False,
    logs: Annotated[Path, typer.Option(help="Folder for the ways' logs.")] = Path("logs/benchmarks"),
) -> None:
    """Run the comparison."""
    small = quick or hardware.device() == "cpu"
    shape = arguments.among(shape or ("tiny" if small else "llama-3-8b"), SHAPES, "--shape")[0]
    wanted = arguments.among(ways or ("ours,speculators" if speculators else "ours"), WAYS, "--ways")
    aheads = arguments.numbers(ttt_steps, "--ttt-steps")
    spec: dict[str, Any] = {
        "pack_tokens": pack_tokens or (512 if small else 8192),
        "draft_vocab": draft_vocab or (160 if small else 32000), "steps": steps or (5 if small else 10), "windows": windows,
        "lengths": arguments.numbers(lengths or ("64,128,256" if small else "1024,2048,4096"), "--lengths"), "packs": packs,
        "train": arguments.mapping(train, "--train"), "profile": profile, "shape": shape,
    }  # fmt: skip
    if max(spec["lengths"]) > spec["pack_tokens"]:
        raise typer.BadParameter(
            f"a row of {max(spec['lengths'])} tokens does not go into a pack of {spec['pack_tokens']}"
        )
    logs.mkdir(parents=True, exist_ok=True)
    with arguments.within(folder) as made:
        spec |= {"folder": made} | prepare(Path(made), spec)
        for steps_ahead in aheads:
            _compare(wanted, spec | {"ttt_steps": steps_ahead}, speculators, logs)


def _compare(wanted: list[str], spec: dict[str, Any], speculators: Path | None, logs: Path) -> None:
    """Run each way and print its line, and then the line of the ratios."""
    found = {}
    for way in wanted:
        found[way] = _run(way, spec, speculators, logs / f"training-{way}-{spec['ttt_steps']}.log")
        print(json.dumps({"way": way, **found[way]}), flush=True)
    told = {key: value for key, value in spec.items() if key != "folder"}
    ratios = {}
    if {"ours", "speculators"} <= set(found):
        ours, theirs = found["ours"], found["speculators"]
        ratios["ratio_tokens_per_second"] = round(ours["tokens_per_second"] / theirs["tokens_per_second"], 3)
        peaks = ours["peak_gpu_gb"], theirs["peak_gpu_gb"]
        ratios["ratio_peak_gpu"] = round(peaks[0] / peaks[1], 3) if all(peaks) else None
    print(json.dumps({"device": hardware.device(), **told, **ratios}))


def prepare(folder: Path, spec: dict[str, Any]) -> dict[str, Any]:
    """A target without layers, rows, their states and a vocabulary, all random; gives what is told of them."""
    import pandas as pd
    from safetensors.torch import save_file

    target = shapes.write(spec["shape"], folder / "target")
    dtype = getattr(torch, target["torch_dtype"])
    vocab, width = target["vocab_size"], target["hidden_size"]
    random = torch.Generator().manual_seed(0)
    table = torch.randn(vocab, width, generator=random, dtype=dtype)
    save_file(
        {"model.embed_tokens.weight": table, "lm_head.weight": table.clone() * 0.02},
        folder / "target" / "model.safetensors",
    )
    rows, left, number = [], spec["packs"] * spec["pack_tokens"], 0
    while left > 0:
        length = min(spec["lengths"][number % len(spec["lengths"])], max(left, 16))
        rows.append(torch.randint(3, vocab, (length,), generator=random, dtype=torch.int32).numpy())
        left, number = left - length, number + 1
    states = folder / "states"
    states.mkdir()
    places: dict[str, list[Any]] = {}
    longest = max(map(len, rows))
    aux = torch.randn(longest, 3, width, generator=random, dtype=dtype)
    final = torch.randn(longest, width, generator=random, dtype=dtype)
    for ids in rows:
        places |= _write_batch(states, target, ids, aux[: len(ids)], final[: len(ids)])
    pd.DataFrame(
        [
            {
                "row_id": store.row_id(ids), "conversation_id": str(number), "source": "random", "domain": "random", "split": "train",
                "input_ids": ids, "span_starts": [int(PROMPT * len(ids))], "span_ends": [len(ids)], "length": len(ids),
                "supervised": len(ids) - int(PROMPT * len(ids)),
            }
            for number, ids in enumerate(rows)
        ]
    ).to_parquet(folder / "rows.parquet")  # fmt: skip
    kept = torch.linspace(0, vocab - 1, spec["draft_vocab"]).long().unique()
    save_file({"d2t": kept - torch.arange(len(kept))}, folder / "vocabulary.safetensors")
    write_json(folder / "target.json", {"source": "random", "revision": None, "trust_remote_code": False} | target)
    manifest = {
        "format": 1, "store": str(states), "fingerprint": states.name, "layers": target["layers"], "dtype": target["torch_dtype"],
        "hidden_size": width, "rows": places, "failed": [], "bytes": 0, "tokens": sum(map(len, rows)),
    }  # fmt: skip
    write_json(folder / "manifest.json", manifest)
    size = sum(path.stat().st_size for path in states.iterdir())
    return {"rows": len(rows), "stored_gb": round(size / 1e9, 6), "draft_vocab": len(kept)}


def _write_batch(
    folder: Path, target: dict[str, Any], ids: Any, aux: torch.Tensor, final: torch.Tensor
) -> dict[str, list[Any]]:
    """One row as a batch file of its own; its part of the manifest."""
    row = store.row_id(ids)
    content = {"aux": aux, "final": final, "token_ids": torch.from_numpy(ids), "offsets": torch.tensor([0, len(ids)])}
    header = store.BatchHeader(
        fingerprint=folder.name, target="random", layers=target["layers"], dtype=target["torch_dtype"],
        hidden_size=target["hidden_size"], rows=[row], lengths=[len(ids)], vllm="0",
        checksums=[store.checksum(*store.row_parts(content, slice(0, len(ids))))],
    )  # fmt: skip
    head, places = store.layout(header)
    buffer = torch.zeros(max(at + size for at, size in places.values()), dtype=torch.uint8)
    buffer[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    for name, view in store.tensors(header, places, lambda at, size: buffer[at : at + size]).items():
        view.copy_(content[name])
    name = store.batch_name([row])
    (folder / name).write_bytes(buffer.numpy().data)
    return {row: [name, 0]}


def _run(way: str, spec: dict[str, Any], speculators: Path | None, log: Path) -> dict[str, Any]:
    """One way in a process of its own; what it measured."""
    places = [*([str(speculators.resolve())] if speculators else []), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory(prefix="ds-bench-") as scratch, open(log, "w") as errors:
        given, answer = Path(scratch) / "spec.json", Path(scratch) / "answer.json"
        given.write_text(json.dumps(spec))
        code = subprocess.run(
            [sys.executable, str(HERE / "training_ways.py"), way, str(given), str(answer)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(places)}, stdout=errors, stderr=errors,
        ).returncode  # fmt: skip
        if code:
            sys.exit(f"the way '{way}' ended with {code}; the end of {log}:\n{log.read_text()[-4000:]}")
        return dict(json.loads(answer.read_text()))


if __name__ == "__main__":
    arguments.run(main)
