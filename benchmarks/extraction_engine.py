"""One way of reading a target, loaded in a process of its own, with the memory that its processes held; and what a disk takes by itself."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from draftsmith import hardware
from draftsmith.extract_shard.plan import batch_tokens
from draftsmith.store import bytes_per_token

HERE = Path(__file__).parent
WAYS = ("plain", "ours", "connector")
# What vLLM's log tells of a start: the slowest rank's line counts.
_PHASES = {
    "weights": re.compile(r"Model loading took [\d.]+ GiB(?: memory)? and ([\d.]+) seconds"),
    "profile and warm-up": re.compile(r"init engine \(.*?\) took ([\d.]+) s"),
}


class Ended(SystemExit):
    """A way's process ended by itself; the message has the end of its log."""


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
        self.peak_host = 0
        self.peak_gpus: list[int] = []
        self.started: dict[str, Any] = {}

    def wait_ready(self) -> None:
        """Wait until the engine is loaded; raises :class:`Ended` when it cannot be."""
        with self._watched():
            self.started = self._answer()
        log = self.log.read_text(errors="replace")
        found = {name: max(map(float, pattern.findall(log)), default=None) for name, pattern in _PHASES.items()}
        self.started["by_log"] = {name: seconds for name, seconds in found.items() if seconds is not None}

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise Ended(f"the way '{self.way}' ended; the end of {self.log}:\n{self.log.read_text()[-4000:]}")
        return dict(json.loads(line))

    def run(self, store: Path, rows: int = 0, prompts: int = 0) -> dict[str, Any]:
        """One pass that writes to ``store``, over the first ``rows`` prompts or all of the set ``prompts``."""
        assert self.process.stdin is not None
        with self._watched():
            asked = {"store": str(store.resolve()), "rows": rows, "prompts": prompts}
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(json.dumps(asked) + "\n")
                self.process.stdin.flush()
            return self._answer()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        stop = threading.Event()
        watch = threading.Thread(target=self._sample, args=(stop,), daemon=True)
        watch.start()
        try:
            yield
        finally:
            stop.set()
            watch.join()

    def _sample(self, stop: threading.Event) -> None:
        while True:
            try:
                mine = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
                # Shared pages are counted once for each process; what differs between the ways is not shared.
                self.peak_host = max(self.peak_host, sum(process.memory_info().rss for process in mine))
                held = gpu_bytes({process.pid for process in mine})
                before = self.peak_gpus or [0] * len(held)
                self.peak_gpus = [max(pair) for pair in zip(before, held, strict=True)]
            except psutil.Error:
                pass
            if stop.wait(0.5):
                return

    @property
    def peak_gpu(self) -> int:
        """The most bytes that it has held on one GPU."""
        return max(self.peak_gpus, default=0)

    def end(self) -> None:
        """Close its input, and wait."""
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()


def gpu_bytes(pids: set[int]) -> list[int]:
    """Bytes that the processes hold on each GPU; empty without GPUs."""
    if hardware.device() == "cpu":
        return []
    import pynvml

    held = []
    for gpu in hardware.gpus():
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(int(gpu.index)))
        held.append(sum(int(process.usedGpuMemory or 0) for process in running if process.pid in pids))
    return held


def peaks(engines: list[Engine]) -> dict[str, float]:
    """The most memory that each way has held so far, the engine's own included."""
    return {
        f"{engine.way}_peak_{kind}_gb": round(held / 1e9, 2)
        for engine in engines
        for kind, held in (("host", engine.peak_host), ("gpu", engine.peak_gpu))
    }


def rates(one: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Tokens/s, GB/s and their ratios of passes of several ways, by their answers; 'disk' is ours to another folder."""
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
    line |= {f"{way}_writer": one[way]["writer"] for way in ("ours", "disk") if "writer" in one.get(way, {})}
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
    found = []
    for _ in range(2):
        begun = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            written = sum(pool.map(write, range(files)))
        found.append(written / (time.perf_counter() - begun))
        for number in range(files):
            (folder / f"probe-{number}").unlink()
    return {
        "bytes_per_token": per_token,
        "raw_gb_per_second": round(found[-1] / 1e9, 3),
        "raw_tokens_per_second": round(found[-1] / per_token, 1),
    }
