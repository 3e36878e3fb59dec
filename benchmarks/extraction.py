"""Speed of extraction beside plain prefill and vLLM's own connector, as ratios within one call.

    python benchmarks/extraction.py --device cpu --quick
    python benchmarks/extraction.py --shape llama-3-8b --store /dev/shm/bench
    python benchmarks/extraction.py --shape kimi-8-layers --tp 2 --store /dev/shm/bench

Three engines are loaded with the same arguments, one a process, and run over the same prompts in random order, several times.
One line of JSON for each repetition, one for the raw speed of the folder that is written to, and last the medians.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import tempfile
from pathlib import Path
from typing import Annotated, Any

import arguments
import shapes
import typer
from extraction_engine import WAYS, Engine, peaks, probe, rates

from draftsmith import get_target, hardware
from draftsmith.config import parse


def main(
    shape: Annotated[str, typer.Option(help="smollm2, llama-3-8b, kimi-8-layers or tiny.")] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "",
    tp: Annotated[int, typer.Option(help="Tensor parallelism.")] = 1,
    tokens: Annotated[int, typer.Option(help="Tokens of one pass.")] = 0,
    lengths: Annotated[str, typer.Option(help="Lengths of prompts, drawn from.")] = "",
    repeats: Annotated[int, typer.Option(help="Passes of each way.")] = 3,
    store: Annotated[
        Path, typer.Option(help="Folder in which one is made that is written to, and removed at the end.")
    ] = Path("work/benchmarks/store"),
    disk: Annotated[Path | None, typer.Option(help="Another folder, on a disk, that ours also writes to.")] = None,
    storage: Annotated[str, typer.Option(help="As extract.storage.")] = "target",
    file_tokens: Annotated[int, typer.Option(help="As extract.batch_tokens; 0: the default.")] = 0,
    step_tokens: Annotated[int, typer.Option(help="As engine.max_num_batched_tokens; 0: the default.")] = 0,
    ways: Annotated[str, typer.Option(help="Which to run.")] = ",".join(WAYS),
    quick: Annotated[bool, typer.Option(help="A size that takes minutes on two CPU cores.")] = False,
    args: Annotated[str, typer.Option(help="More arguments of vLLM's LLM, as JSON.")] = "{}",
    logs: Annotated[Path, typer.Option(help="Folder for the engines' logs.")] = Path("logs/benchmarks"),
) -> None:
    """Run the comparison."""
    device = device or hardware.device()
    shape = shape or ("smollm2" if device == "cpu" else "llama-3-8b")
    wanted = tuple(arguments.among(ways, WAYS, "--ways"))
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        tokens, lengths = tokens or (4096 if quick else 32768), lengths or "128,256,512"
        repeats = 5 if quick else repeats
    else:
        tokens, lengths = tokens or 524288, lengths or "1024"
    extra = json.loads(args) | ({} if shape == "smollm2" else {"load_format": "dummy", "skip_tokenizer_init": True})
    if device != "cpu":
        # Several engines share the GPUs, so none may measure what is free and take it.
        extra = {"kv_cache_memory_bytes": 8 << 30} | extra
    logs.mkdir(parents=True, exist_ok=True)
    told = {"store": str(store), "disk": str(disk) if disk else None}
    with contextlib.ExitStack() as made:
        scratch = made.enter_context(tempfile.TemporaryDirectory(prefix="ds-bench-"))
        store = Path(made.enter_context(arguments.within(store)))
        disk = Path(made.enter_context(arguments.within(disk))) if disk else None
        engine = {
            "device": device,
            "tp": tp,
            "args": extra,
            "gpu_memory_utilization": 0.25,
            "max_num_batched_tokens": step_tokens or None,
        }
        config = {"engine": engine, "extract": {"storage": storage, "batch_tokens": file_tokens or None}}
        target = _target(shape, Path(scratch))
        config["target"] = {"layers": target["layers"]}
        spec = {
            "config": config, "target": target, "tokens": tokens, "prompts": [[int(n) for n in lengths.split(",")]],
            "store": str(store.resolve()), "scratch": scratch,
        }  # fmt: skip
        (Path(scratch) / "spec.json").write_text(json.dumps(spec))
        raw = {"": probe(store, target, tokens, config)} | (
            {"disk_": probe(disk, target, tokens, config)} if disk else {}
        )
        found = {f"{name}{key}": value for name, values in raw.items() for key, value in values.items()}
        print(json.dumps({**told, **found}), flush=True)
        engines = [Engine(way, Path(scratch) / "spec.json", logs / f"extraction-{way}.log") for way in wanted]
        try:
            for engine_ in engines:
                engine_.wait_ready()
            summary = compare(engines, repeats, store, disk)
        finally:
            for engine_ in engines:
                engine_.end()
    print(
        json.dumps(
            {
                "shape": shape,
                "device": device,
                "tp": tp,
                "tokens": tokens,
                "repeats": repeats,
                "storage": storage,
                **found,
                **summary,
            }
        )
    )


def _target(shape: str, scratch: Path) -> dict[str, Any]:
    if shape != "smollm2":
        return shapes.write(shape, scratch / "target")
    file = Path("work/benchmarks/target.json")
    get_target.run(parse({}, "benchmark"), cache=Path("resources/targets"), target=file)
    described: dict[str, Any] = json.loads(file.read_text())
    count = described["num_layers"]
    return described | {"layers": [2, count // 2, count - 3]}


def compare(engines: list[Engine], repeats: int, store: Path, disk: Path | None) -> dict[str, Any]:
    """Passes in random order, after a short one of each way that is not counted."""
    order = random.Random(1)
    passes = [(engine, engine.way, store) for engine in engines]
    passes += [(engine, "disk", disk) for engine in engines if engine.way == "ours" and disk is not None]
    for engine, _, folder in passes:
        engine.run(folder, rows=64 if hardware.device() != "cpu" else 0)
    rounds: list[dict[str, dict[str, Any]]] = []
    for _ in range(repeats):
        order.shuffle(passes)
        rounds.append({name: engine.run(folder) for engine, name, folder in passes})
        print(json.dumps(rates(rounds[-1]) | peaks(engines)), flush=True)
    lines = [rates(one) for one in rounds]
    summary = {
        name: round(statistics.median(line[name] for line in lines), 4) for name in lines[0] if name.startswith("ratio")
    }
    for engine in engines:
        summary |= {
            f"{engine.way}_tokens_per_second": round(statistics.median(one[engine.way]["tokens_per_second"] for one in rounds), 1),
            f"{engine.way}_start": engine.started,
        }  # fmt: skip
    return summary | peaks(engines)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
