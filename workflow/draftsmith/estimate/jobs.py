"""What a profile asks for each rule: Snakemake itself is asked, by a dry run beside the rest of the estimate."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

_RULE = re.compile(r"^(?:local)?rule (\w+):")
_RESOURCES = re.compile(r"^    resources: (.*)$")
_SECONDS = 60.0


@dataclass
class Asked:
    """Resources of each rule's job as Snakemake would submit it, and how many jobs; ``why`` there are none."""

    resources: dict[str, dict[str, str]] = field(default_factory=dict)
    count: dict[str, int] = field(default_factory=dict)
    why: str = ""

    def number(self, rule: str, name: str) -> int | None:
        """A resource that is a whole number."""
        value = self.resources.get(rule, {}).get(name, "")
        return int(value) if value.isdigit() else None

    def on_slurm(self, rule: str) -> bool:
        """Whether the rule's job goes to a partition, whose nodes this machine need not be like."""
        return bool(self.resources.get(rule, {}).get("slurm_partition"))

    def nodes(self, rule: str) -> int:
        """Nodes of one job, over which its GPUs are counted together."""
        return max(1, self.number(rule, "nodes") or 1)

    @property
    def shards(self) -> int:
        """Jobs of the extraction, and of a regeneration by engines."""
        return max(1, self.count.get("extract_shard", 1))


class DryRun:
    """``snakemake -n`` over all rules, begun at once and asked for later."""

    def __init__(self, profile: str, config: Path, target: Path | None = None) -> None:
        """``target`` is a folder to look at instead of the config's, which need not be on this machine."""
        root = Path(__file__).resolve().parents[3]
        folder = root / "profiles" / profile
        self._why = ""
        self._process: subprocess.Popen[str] | None = None
        if not (root / "Snakefile").is_file():
            self._why = "the package is installed without its Snakefile"
            return
        command = [
            sys.executable, "-m", "snakemake", "-s", str(root / "Snakefile"), "--profile", str(folder if folder.is_dir() else profile),
            "--configfile", str(config), "-n", "--forceall", "--quiet", "reason",
        ]  # fmt: skip
        if target is not None:
            command += ["--config", f"target={json.dumps({'source': str(target.absolute())})}"]
        try:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        except OSError as error:
            self._why = f"snakemake cannot be started ({error.strerror})"

    def asked(self) -> Asked:
        """What it said."""
        if self._process is None:
            return Asked(why=self._why)
        try:
            out, err = self._process.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return Asked(why=f"snakemake -n took more than {_SECONDS:.0f} s")
        if self._process.returncode:
            lines = [line for line in (err + out).splitlines() if line.strip()]
            return Asked(why=f"snakemake -n failed: {lines[-1].strip() if lines else 'without a word'}")
        return parse(out + err)


def parse(text: str) -> Asked:
    """Resources by rule from what ``snakemake -n`` prints."""
    asked, rule = Asked(), ""
    for line in text.splitlines():
        if match := _RULE.match(line):
            rule = match[1]
            asked.count[rule] = asked.count.get(rule, 0) + 1
        elif rule and (match := _RESOURCES.match(line)):
            pairs = (pair.partition("=") for pair in match[1].split(", "))
            asked.resources[rule] = {name: value for name, _, value in pairs}
    return asked
