"""One call of benchmarks/kimi_tp8.py: engines of two depths are loaded, take turns over the same prompts, and leave records."""

from __future__ import annotations

import json
import random
import re
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kimi_figures
import kimi_target
from extraction_engine import WAYS, Ended, Engine, probe

from draftsmith import config as configs

REPO = Path(__file__).resolve().parents[1]
# What a pass that is not counted reads: a few steps.
_WARM_TOKENS = 65536
_ERROR = re.compile(r"\b\w*(Error|Exception): \S")
# What a process says of the end of another one.
_OF_ANOTHER = re.compile(r"initialization failed|EngineCore encountered an issue|See stack trace")


@dataclass
class Run:
    """One call: what is measured, where it is written to, and what is known by now.

    ``form`` is that of :func:`kimi_target.config`; unless it is ``fixed``, 'text' is tried where the whole cannot be started.
    """

    tp: int
    small: bool
    form: str
    fixed: bool
    repeats: int
    ways: list[str]
    tokens: int
    lengths: list[int]
    args: dict[str, Any]
    spread: bool
    gpu_bytes: int
    logs: Path
    file: Path | None
    known: list[kimi_figures.Record] = field(default_factory=list)
    scratch: Path = Path()
    store: Path = Path()
    disk: Path | None = None

    @property
    def stamp(self) -> dict[str, Any]:
        """What two records have to have in common to be compared."""
        return {
            "tp": self.tp,
            "form": self.form,
            "tokens_of_a_pass": self.tokens,
            "small": self.small,
            "spread": self.spread,
        }

    def read(self) -> None:
        """Take up what earlier calls measured, in the form that they found to run."""
        lines = self.file.read_text().splitlines() if self.file is not None and self.file.is_file() else []
        earlier = [json.loads(one) for one in lines if one.endswith("}")]
        ran = [one["form"] for one in earlier if one["record"] == "engine"]
        if ran and not self.fixed:
            self.form, self.fixed = ran[-1], True
        self.known = [one for one in earlier if self.stamp.items() <= one.items()]

    def tell(self, record: dict[str, Any]) -> None:
        """Print a record and keep it."""
        whole = self.stamp | record
        self.known.append(whole)
        print(json.dumps(whole), flush=True)
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with open(self.file, "a") as file:
                file.write(json.dumps(whole) + "\n")

    def measure(self, depth: int) -> None:
        """All ways that are not known yet, with ``depth`` layers; those that fit beside one another at once."""
        wanted = [way for way in self.ways if (depth, way) not in kimi_figures.finished(self.known)]
        at_once = 1
        if not self.small:
            at_once = max(
                n
                for n in range(1, len(WAYS) + 1)
                if n == 1 or kimi_target.layers_that_fit(self.gpu_bytes, self.tp, n) >= depth
            )
        groups = [wanted[first : first + at_once] for first in range(0, len(wanted), at_once)]
        for group in groups:
            ran = self.group(depth, group)
            if not ran and not self.fixed:
                self.form, self.fixed = "text", True
                ran = self.group(depth, group)
            self.fixed = self.fixed or ran

    def spec(self, depth: int) -> dict[str, Any]:
        """What the processes of the ways are told."""
        target = kimi_target.write(self.scratch / f"target-{self.form}-{depth}", depth, self.form, self.small)
        engine = configs.load(REPO / "config/kimi-k2.5.yaml").engine.model_dump(mode="json") | {"tp": self.tp}
        extra: dict[str, Any] = {"load_format": "dummy"}
        if self.small:
            engine |= {"device": "cpu", "max_num_batched_tokens": None, "max_num_seqs": 64}
        else:
            # Several engines may share the GPUs, so none may measure what is free and take it.
            engine |= {"gpu_memory_utilization": 0.1, "max_num_batched_tokens": kimi_target.STEP_TOKENS}
            extra |= {"kv_cache_memory_bytes": kimi_target.KV_BYTES}
        config = {
            "engine": engine | {"args": extra | self.args}, "target": {"layers": target["layers"]},
            "extract": {"storage": "target", "batch_tokens": None},
        }  # fmt: skip
        return {
            "config": config, "target": target, "tokens": self.tokens, "prompts": [[length] for length in self.lengths],
            "store": str(self.store), "scratch": str(self.scratch), "spread_experts": self.spread,
        }  # fmt: skip

    def group(self, depth: int, ways: list[str]) -> bool:
        """Load the engines of ``ways`` at once, and let them take turns; False when none of them could be loaded."""
        spec, file = self.spec(depth), self.scratch / f"spec-{self.form}-{depth}.json"
        file.write_text(json.dumps(spec))
        if not any(one["record"] == "folder" for one in self.known):
            for name, place in (("store", self.store), ("disk", self.disk)):
                if place is not None:
                    found = probe(place, spec["target"], self.tokens, spec["config"])
                    self.tell({"record": "folder", "folder": name, **found})
        started = [Engine(way, file, self.logs / f"kimi-{depth}-{way}.log") for way in ways]
        running = []
        try:
            for engine in started:
                try:
                    engine.wait_ready()
                    running.append(engine)
                    self.check_gates(depth, engine)
                except Ended as error:
                    self.failed(depth, engine, error)
            for index, length in enumerate(self.lengths):
                self.turns(depth, running, index, length)
            for engine in running:
                self.tell(
                    {
                        "record": "engine", "layers": depth, "way": engine.way, **engine.started,
                        "peak_host_gb": round(engine.peak_host / 1e9, 2),
                        "peak_gpu_gb": [round(held / 1e9, 2) for held in engine.peak_gpus[: self.tp]],
                    }
                )  # fmt: skip
        finally:
            for engine in started:
                engine.end()
        return any(engine.started for engine in started)

    def check_gates(self, depth: int, engine: Engine) -> None:
        """Say so where tokens do not go to all experts: on a CPU gates are packed away before they could be drawn anew."""
        drawn = engine.started.get("gates_drawn") or [0]
        if self.spread and set(drawn) != {depth - 1}:
            text = (
                f"gates of {drawn} layers were drawn anew, {depth - 1} were expected: tokens go to the same few experts"
            )
            self.tell({"record": "warning", "layers": depth, "way": engine.way, "text": text})

    def turns(self, depth: int, running: list[Engine], place: int, length: int) -> None:
        """Passes over the prompts of one length in random order, after a short one of each that is not counted."""
        turns = [(engine, engine.way, self.store) for engine in running]
        turns += [(engine, "disk", self.disk) for engine in running if engine.way == "ours" and self.disk is not None]
        answers: dict[str, list[dict[str, Any]]] = {}
        order = random.Random(length)
        for counted in range(self.repeats + 1):
            order.shuffle(turns)
            for engine, name, folder in list(turns):
                if engine not in running:
                    continue
                try:
                    answer = engine.run(folder, 0 if counted else max(1, _WARM_TOKENS // length), place)
                except Ended as error:
                    running.remove(engine)
                    self.failed(depth, engine, error)
                    continue
                if counted:
                    answers.setdefault(name, []).append(answer)
        for name, found in answers.items():
            seconds = statistics.median(one["seconds"] for one in found)
            record = {
                "record": "pass", "layers": depth, "way": name, "prompts": length, "tokens": found[0]["tokens"], "seconds": round(seconds, 4),
                "tokens_per_second": round(found[0]["tokens"] / seconds, 1), "bytes": found[0]["bytes"],
                "gb_per_second": round(found[0]["bytes"] / seconds / 1e9, 3), "passes": [one["seconds"] for one in found],
            }  # fmt: skip
            self.tell(record | ({"writer": found[-1]["writer"]} if "writer" in found[-1] else {}))

    def failed(self, depth: int, engine: Engine, error: Ended) -> None:
        """A way that does not run is a line, with the last error of its log; the others go on."""
        print(error, file=sys.stderr, flush=True)
        lines = engine.log.read_text(errors="replace").splitlines()
        words = [text for text in lines if _ERROR.search(text) and not _OF_ANOTHER.search(text)]
        record = {"record": "failed", "layers": depth, "way": engine.way, "log": str(engine.log)}
        self.tell(record | {"error": (words or [str(error).splitlines()[0]])[-1].strip()[-400:]})
