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
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import arguments
import psutil
import shapes
import typer

from draftsmith import get_target, hardware
from draftsmith.config import parse
from draftsmith.extract_shard.plan import batch_tokens
from draftsmith.store import bytes_per_token

HERE = Path(__file__).parent
WAYS = ("plain", "ours", "connector")


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
            "config": config, "target": target, "tokens": tokens, "lengths": [int(n) for n in lengths.split(",")],
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


class Engine:
    """A way in a process of its own."""

    def __init__(self, way: str, spec: Path, log: Path) -> None:
        self.way, self.log = way, log
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        if way == "connector":
            # Within the driver's process its last files are never written.
            environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        with open(log, "w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "extraction_ways.py"), way, str(spec)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
            )  # fmt: skip
        self.peak_host = self.peak_gpu = 0
        self.started: dict[str, Any] = {}

    def wait_ready(self) -> None:
        """Wait until the engine is loaded."""
        self.started = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"the way '{self.way}' ended; the end of {self.log}:\n{self.log.read_text()[-4000:]}")
        return dict(json.loads(line))

    def run(self, store: Path, rows: int = 0) -> dict[str, Any]:
        """One pass that writes to ``store``, over the first ``rows`` prompts or all."""
        assert self.process.stdin is not None
        stop = threading.Event()
        watch = threading.Thread(target=self._sample, args=(stop,), daemon=True)
        watch.start()
        self.process.stdin.write(json.dumps({"store": str(store.resolve()), "rows": rows}) + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        stop.set()
        watch.join()
        return answer

    def _sample(self, stop: threading.Event) -> None:
        while True:
            try:
                mine = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
                # Shared pages are counted once for each process; what differs between the ways is not shared.
                self.peak_host = max(self.peak_host, sum(process.memory_info().rss for process in mine))
                self.peak_gpu = max(self.peak_gpu, _gpu_bytes({process.pid for process in mine}))
            except psutil.Error:
                pass
            if stop.wait(0.5):
                return

    def end(self) -> None:
        """Close its input, and wait."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()


def _gpu_bytes(pids: set[int]) -> int:
    if hardware.device() == "cpu":
        return 0
    import pynvml

    held = []
    for gpu in hardware.gpus():
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(int(gpu.index)))
        held.append(sum(int(process.usedGpuMemory or 0) for process in running if process.pid in pids))
    return max(held, default=0)


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
        print(json.dumps(_line(rounds[-1]) | _peaks(engines)), flush=True)
    lines = [_line(one) for one in rounds]
    summary = {
        name: round(statistics.median(line[name] for line in lines), 4) for name in lines[0] if name.startswith("ratio")
    }
    for engine in engines:
        summary |= {
            f"{engine.way}_tokens_per_second": round(statistics.median(one[engine.way]["tokens_per_second"] for one in rounds), 1),
            f"{engine.way}_start": engine.started,
        }  # fmt: skip
    return summary | _peaks(engines)


def _peaks(engines: list[Engine]) -> dict[str, float]:
    """The most memory that each way has held so far, the engine's own included."""
    return {
        f"{engine.way}_peak_{kind}_gb": round(held / 1e9, 2)
        for engine in engines
        for kind, held in (("host", engine.peak_host), ("gpu", engine.peak_gpu))
    }


def _line(one: dict[str, dict[str, Any]]) -> dict[str, Any]:
    line: dict[str, Any] = {}
    for way, answer in sorted(one.items()):
        line[f"{way}_tokens_per_second"] = answer["tokens_per_second"]
        if answer["bytes"]:
            line[f"{way}_gb_per_second"] = round(answer["bytes"] / answer["seconds"] / 1e9, 3)
    pairs = (
        ("ours", "plain", "ratio_to_prefill"),
        ("ours", "connector", "ratio_to_connector"),
        ("disk", "plain", "ratio_disk_to_prefill"),
    )
    for mine, other, name in pairs:
        if mine in one and other in one:
            line[name] = round(one[mine]["tokens_per_second"] / one[other]["tokens_per_second"], 4)
    line |= {f"{way}_writer": one[way]["writer"] for way in ("ours", "disk") if way in one}
    return line


def probe(folder: Path, target: dict[str, Any], tokens: int, config: dict[str, Any]) -> dict[str, Any]:
    """What the folder's disk takes when nothing else is done: as many bytes, files and threads as extraction writes."""
    dtype = hardware.target_dtype("auto", target["torch_dtype"])
    per_token = bytes_per_token(len(target["layers"]), target["hidden_size"], dtype, config["extract"]["storage"])
    per_file = min(batch_tokens(config["extract"]["batch_tokens"], per_token), tokens) * per_token
    files, threads = max(tokens * per_token // per_file, 1), 1 if hardware.device() == "cpu" else 8
    folder.mkdir(parents=True, exist_ok=True)
    block = os.urandom(8 << 20)

    def write(number: int) -> int:
        path = folder / f"probe-{number}"
        with open(path, "wb", buffering=0) as file:
            left = per_file
            while left > 0:
                left -= file.write(block[: min(left, len(block))])
            os.fsync(file.fileno())
        return path.stat().st_size

    # Twice, as a virtual machine may have to ask its host for memory the first time.
    rates = []
    for _ in range(2):
        begun = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            written = sum(pool.map(write, range(files)))
        rates.append(written / (time.perf_counter() - begun))
        for number in range(files):
            (folder / f"probe-{number}").unlink()
    return {
        "bytes_per_token": per_token,
        "raw_gb_per_second": round(rates[-1] / 1e9, 3),
        "raw_tokens_per_second": round(rates[-1] / per_token, 1),
    }


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
