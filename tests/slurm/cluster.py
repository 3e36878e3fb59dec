"""A Slurm cluster for tests: how it is started, asked and disturbed."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeVar

LAB = Path(__file__).with_name("slurm-lab")


@dataclass(frozen=True)
class Job:
    """One job as sacct tells of it; ``limit`` is its time limit in minutes."""

    number: int
    rule: str
    node: str
    partition: str
    tres: str
    state: str
    start: str
    end: str
    limit: int
    account: str
    qos: str


class Running(NamedTuple):
    """A running job."""

    number: int
    node: str


@dataclass
class Cluster:
    """A running cluster of two nodes with eight GPUs each and one without; ``environment`` is what a user's shell has."""

    folder: Path
    port: int
    environment: Mapping[str, str] = field(default_factory=dict)

    def lab(self, *arguments: str, check: bool = True) -> None:
        """Call the script that makes the cluster."""
        environment = os.environ | {"SLURM_LAB_DIR": str(self.folder), "SLURM_LAB_PORT": str(self.port)}
        subprocess.run([LAB, *arguments], check=check, env=environment, stdin=subprocess.DEVNULL)

    def start(self) -> None:
        """Bring it up, or what of it is down."""
        self.lab("start")
        self.environment = MappingProxyType(
            {
                "SLURM_CONF": str(self.folder / "etc/slurm.conf"),
                "DRAFTSMITH_ACCOUNT": "lab",
                "PYTHONPATH": str(LAB.with_name("often")),
            }
        )

    def ask(self, *command: str) -> str:
        """Standard output of one of Slurm's own commands."""
        return subprocess.run(
            command, env=os.environ | self.environment, capture_output=True, text=True, check=True
        ).stdout

    def jobs(self, since: int = 0) -> list[Job]:
        """Jobs of rules with a number above ``since``, oldest first, each as it was last run."""
        fields = "JobIDRaw,Comment,NodeList,Partition,AllocTRES,State,Start,End,TimelimitRaw,Account,QOS"
        found = []
        for line in self.ask("sacct", "-X", "-n", "-P", "-S", "now-2hours", "-o", fields).splitlines():
            number, comment, *rest, limit, account, qos = line.split("|")
            rule = re.match(r"rule_(\w+?)(?:_wildcards_.*)?$", comment)
            if rule and int(number) > since:
                found.append(Job(int(number), rule[1], *rest, int(limit or 0), account, qos))
        return sorted(found, key=lambda job: job.number)

    def last(self) -> int:
        """Number of the newest job; 0 if there was none."""
        return max((int(number) for number in self.ask("sacct", "-X", "-n", "-P", "-o", "JobIDRaw").split()), default=0)

    def running(self, rule: str, since: int) -> Running | None:
        """The running job of ``rule`` with a number above ``since``; sacct does not know yet whose it is."""
        for line in self.ask("squeue", "-h", "-t", "RUNNING", "-o", "%A|%N|%k").splitlines():
            number, node, comment = line.split("|")
            if int(number) > since and comment.startswith(f"rule_{rule}"):
                return Running(int(number), node)
        return None


T = TypeVar("T")


def wait(look: Callable[[], T | None], seconds: float = 180.0) -> T:
    """Ask until the answer is true."""
    end = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < end, "nothing came of waiting"
        time.sleep(0.3)
    return found
