"""Room for what a run writes: free space, free files, and quotas where the machine tells them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from draftsmith.estimate.model import Check

_SECONDS = 5.0
_KIB = 1024


@dataclass(frozen=True)
class Quota:
    """What is left to this user on a file system, in bytes, and by which program that is told."""

    left: int
    limit: int
    program: str


def existing(path: Path) -> Path:
    """The nearest folder that is there already."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


@dataclass(frozen=True)
class Need:
    """What is to be written to a folder, which need not be there yet: bytes and files."""

    name: str
    path: Path
    bytes: int
    files: int = 0


def rooms(needs: Sequence[Need]) -> list[Check]:
    """Whether everything has room; what lies on one file system needs it together."""
    together: dict[int, list[Need]] = {}
    for need in needs:
        together.setdefault(os.stat(existing(need.path)).st_dev, []).append(need)
    checks = []
    for group in together.values():
        size, files = sum(need.bytes for need in group), sum(need.files for need in group)
        checks += room(", ".join(need.name for need in group), group[0].path, size, files)
    return checks


def room(name: str, path: Path, need: int, files: int = 0) -> list[Check]:
    """Whether ``need`` bytes in ``files`` files fit into ``path``, which need not be there yet."""
    folder = existing(path)
    free = shutil.disk_usage(folder).free
    checks = [_compared(f"{name}: disk", need, free, f"{free / 1e9:,.1f} GB are free in {folder}")]
    found = os.statvfs(folder)
    # File systems without a fixed number of files tell none.
    if files and found.f_files and found.f_favail < files:
        checks.append(
            Check(
                name=f"{name}: files",
                status="fail",
                detail=f"{files:,} files, and {found.f_favail:,} more can be made in {folder}",
            )
        )
    quota = quota_of(folder)
    if quota is not None:
        told = f"{quota.left / 1e9:,.1f} of {quota.limit / 1e9:,.1f} GB are left of the quota ({quota.program})"
        checks.append(_compared(f"{name}: quota", need, quota.left, told))
    return checks


def _compared(name: str, need: int, have: int, told: str) -> Check:
    status = "fail" if need > have else "warn" if need > 0.8 * have else "ok"
    mend = "; free some, or name another folder" if status == "fail" else ""
    return Check(name=name, status=status, detail=f"{need / 1e9:,.1f} GB are needed, {told}{mend}")  # type: ignore[arg-type]


def quota_of(folder: Path) -> Quota | None:
    """This user's quota on the file system of ``folder``; None where there is none, or nobody tells."""
    device, kind = _mount(folder)
    if kind == "lustre" and shutil.which("lfs"):
        text = _run(["lfs", "quota", "-q", "-u", str(os.getuid()), str(folder)])
        return _parsed(text, "lfs quota", None)
    if shutil.which("quota"):
        return _parsed(_run(["quota", "-u", "-w", "-p"]), "quota", device)
    return None


def _run(command: list[str]) -> str:
    try:
        # `quota` ends with 1 when one is exceeded, and says so all the same.
        return subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _parsed(text: str, program: str, device: str | None) -> Quota | None:
    """The line of a file system: its name, blocks of 1 KiB in use, soft limit, hard limit (0 is none)."""
    for line in text.splitlines():
        match = re.match(r"\s*(\S+)\s+(\d+)\*?\s+(\d+)\s+(\d+)\b", line)
        if match and (device is None or match[1] == device):
            used, soft, hard = (int(match[place]) * _KIB for place in (2, 3, 4))
            limit = min((bound for bound in (soft, hard) if bound), default=0)
            return Quota(max(0, limit - used), limit, program) if limit else None
    return None


def _mount(folder: Path) -> tuple[str | None, str | None]:
    """Device and kind of the file system that ``folder`` lies on, by /proc/mounts."""
    found: tuple[str | None, str | None] = (None, None)
    longest = -1
    try:
        lines = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        device, point, kind, *_ = [part.replace("\\040", " ") for part in line.split(" ")]
        if folder.is_relative_to(point) and len(point) > longest:
            found, longest = (device, kind), len(point)
    return found
