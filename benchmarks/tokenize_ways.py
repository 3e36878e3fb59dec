"""The two ways of tokenize.py, each in a process of its own, and what is measured of them."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

DEMO = Path(__file__).resolve().parents[1] / "config/demo/conversations.jsonl"
WAYS = ("stage", "map")
_TURNS = (1, 2, 2, 3, 3, 4, 5, 8)


def benchmark(
    conversations: Annotated[int, typer.Option(help="How many.")] = 32768,
    repeats: Annotated[int, typer.Option(help="Passes of each way.")] = 3,
    quick: Annotated[bool, typer.Option(help="A size that takes less than a minute.")] = False,
    target: Annotated[Path | None, typer.Option(help="target.json of another target than the demo's.")] = None,
    logs: Annotated[Path, typer.Option(help="Folder for logs.")] = Path("logs/benchmarks"),
) -> None:
    """Run the comparison."""
    if quick:
        conversations, repeats = min(conversations, 512), 1
    logs.mkdir(parents=True, exist_ok=True)
    lines = []
    with tempfile.TemporaryDirectory(prefix="ds-bench-") as scratch:
        folder = Path(scratch)
        described = target or _demo_target()
        write_conversations(folder / "conversations.jsonl", conversations)
        for repeat in range(repeats):
            passes = {
                way: Pass(way, folder / f"{way}-{repeat}", described, logs / f"tokenize-{way}.log") for way in WAYS
            }
            try:
                order = WAYS if repeat % 2 == 0 else WAYS[::-1]
                done = {way: passes[way].run(folder / "conversations.jsonl") for way in order}
                line: dict[str, Any] = {
                    f"{way}_rows_per_second": round(conversations / done[way]["seconds"], 1) for way in WAYS
                }
                line |= {f"{way}_cpu_seconds": done[way]["cpu_seconds"] for way in WAYS}
                line |= {
                    "ratio": round(done["map"]["seconds"] / done["stage"]["seconds"], 4),
                    "ratio_by_cpu_seconds": round(done["map"]["cpu_seconds"] / done["stage"]["cpu_seconds"], 4),
                }
                line |= {name: done["stage"][name] for name in ("peak_gb_above_imports", "processes")}
            finally:
                for one in passes.values():
                    one.end()
            lines.append(line)
            print(json.dumps(line), flush=True)
        put_on_top(folder / "conversations.jsonl", conversations)
        second = Pass("stage", folder / f"stage-{repeats - 1}", described, logs / "tokenize-second.log")
        try:
            again = second.run(folder / "conversations.jsonl")
        finally:
            second.end()
    medians = {
        name: round(statistics.median(line[name] for line in lines), 4)
        for name in ("stage_rows_per_second", "map_rows_per_second", "ratio", "ratio_by_cpu_seconds")
    }
    medians["peak_gb_above_imports"] = max(line["peak_gb_above_imports"] for line in lines)
    medians |= {f"second_run_{name}": value for name, value in again.items()}
    print(json.dumps({"conversations": conversations, "repeats": repeats, **lines[-1], **medians}))


def write_conversations(path: Path, count: int) -> None:
    """``count`` conversations of the demo's exchanges, none like another."""
    exchanges = []
    for line in DEMO.read_text().splitlines():
        messages = [message for message in json.loads(line)["messages"] if message["role"] != "system"]
        exchanges += [
            (asked["content"], told["content"]) for asked, told in zip(messages[::2], messages[1::2], strict=False)
        ]
    source = random.Random(0)
    with open(path, "w") as file:
        for number in range(count):
            messages = []
            for turn in range(source.choice(_TURNS)):
                asked, told = source.choice(exchanges)
                messages += [
                    {"role": "user", "content": f"{asked} (Case {number}, question {turn}.)"},
                    {"role": "assistant", "content": f"{told} That is case {number}."},
                ]
            file.write(json.dumps({"id": f"c{number}", "domain": f"d{number % 8}", "messages": messages}) + "\n")


def put_on_top(path: Path, number: int) -> None:
    """One more conversation, in front of all."""
    messages = [
        {"role": "user", "content": f"And case {number}?"},
        {"role": "assistant", "content": "Nobody has asked yet."},
    ]
    added = json.dumps({"id": f"c{number}", "domain": "d0", "messages": messages})
    path.write_text(f"{added}\n{path.read_text()}")


def _demo_target() -> Path:
    from draftsmith import get_target
    from draftsmith.config import parse

    file = Path("work/benchmarks/target.json")
    get_target.run(parse({}, "benchmark"), cache=Path("resources/targets"), target=file)
    return file


class Pass:
    """A way in a process of its own."""

    def __init__(self, way: str, folder: Path, target: Path, log: Path) -> None:
        self.way, self.log = way, log
        folder.mkdir(exist_ok=True)
        with open(log, "w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, __file__, way, str(folder), str(target.resolve())],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                env=os.environ | {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1"},
            )  # fmt: skip
        self.imports = self._answer()["imports"]

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"the way '{self.way}' ended; the end of {self.log}:\n{self.log.read_text()[-4000:]}")
        return dict(json.loads(line))

    def run(self, conversations: Path) -> dict[str, Any]:
        """One pass: its seconds, and what its processes held at most above their imports."""
        assert self.process.stdin is not None
        watch = _Memory(self.process.pid, self.imports)
        watch.start()
        self.process.stdin.write(f"{conversations}\n")
        self.process.stdin.flush()
        answer = self._answer()
        watch.stop.set()
        watch.join()
        answer["cpu_seconds"] = round(watch.cpu_seconds, 2)
        return answer | {"peak_gb_above_imports": round(watch.peak / 1e9, 3), "processes": watch.processes}

    def end(self) -> None:
        """Let the process end."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()


class _Memory(threading.Thread):
    """Looks at a process and all below it ten times a second."""

    def __init__(self, pid: int, imports: int) -> None:
        super().__init__(daemon=True)
        self._pid, self._imports = pid, imports
        self.stop = threading.Event()
        self.peak = self.processes = 0
        self._seconds: dict[int, tuple[float, float]] = {}

    @property
    def cpu_seconds(self) -> float:
        """What all the processes have computed since the first look."""
        return sum(last - first for first, last in self._seconds.values())

    def run(self) -> None:
        """Until :attr:`stop` is set."""
        import psutil

        top = psutil.Process(self._pid)
        began = time.time()
        while not self.stop.wait(0.1):
            held = []
            for process in [top, *top.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    held.append(process.memory_info().rss)
                    spent = sum(process.cpu_times()[:2])
                    before = spent if process.create_time() < began else 0.0
                    self._seconds[process.pid] = (self._seconds.get(process.pid, (before, 0.0))[0], spent)
            self.peak = max(self.peak, sum(max(0, one - self._imports) for one in held))
            self.processes = max(self.processes, len(held))


def serve(way: str, folder: Path, target: Path) -> None:
    """In the process of a way: run it on each file that is named on standard input."""
    import psutil

    run = {"stage": _stage, "map": _map}[way](folder, target)
    print(json.dumps({"imports": psutil.Process().memory_info().rss}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(Path(line.strip()))), flush=True)


def _stage(folder: Path, target: Path) -> Any:
    import pandas  # noqa: F401 (Arrow imports it when it makes its first array)
    import pyarrow.parquet  # noqa: F401

    from draftsmith import tokenize, tokenizers_alone
    from draftsmith.config import parse
    from draftsmith.files import read_json
    from draftsmith.tokenize import row_pool  # noqa: F401

    tokenizers_alone.load()

    def run(conversations: Path) -> dict[str, Any]:
        begun = time.perf_counter()
        tokenize.run(
            parse({"data": {"sources": [{"path": str(conversations)}]}}, "benchmark"),
            target=target, conversations=None, rows=folder / "rows.parquet", prompts=folder / "prompts.jsonl",
            report=folder / "tokenize.json", workdir=folder / "work",
        )  # fmt: skip
        seconds = time.perf_counter() - begun
        report = read_json(folder / "tokenize.json")
        return {"seconds": round(seconds, 2), "made": report["made"], "reused": report["reused"]}

    return run


def _map(folder: Path, target: Path) -> Any:
    from draftsmith import hardware, tokenizers_alone

    tokenizers_alone.load()
    import datasets
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(json.loads(target.read_text())["path"])
    datasets.disable_caching()

    def run(conversations: Path) -> dict[str, Any]:
        rows = datasets.load_dataset("json", data_files=str(conversations), cache_dir=str(folder), split="train")
        begun = time.perf_counter()
        rows.map(
            lambda row: {"input_ids": tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=False)},
            num_proc=len(hardware.cores()), remove_columns=rows.column_names,
        )  # fmt: skip
        return {"seconds": round(time.perf_counter() - begun, 2)}

    return run


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
